"""Every number that hardware, golden model, simulator and host must agree on; plain Python, imports nothing."""
