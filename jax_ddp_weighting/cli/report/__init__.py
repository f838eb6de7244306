"""The `report` command: what it finds, draws and writes."""
