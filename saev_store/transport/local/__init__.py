"""Files of this machine: memory maps, explicit reads, durable writes."""
