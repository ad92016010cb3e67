"""Native kernels, one folder a kind of device."""
