"""Thread pools, work on clusters, optional libraries, progress bars."""
