"""The kernels themselves, in Triton's language. The files one folder higher make launches of them."""
