"""The kernels themselves, in Triton's language. A launch is made of them one folder higher."""
