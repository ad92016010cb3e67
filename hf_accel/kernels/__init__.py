"""Native kernels. Each kind of device has its own folder."""
