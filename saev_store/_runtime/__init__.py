"""Thread pools, locks that survive forks, closing of abandoned objects, progress bars."""
