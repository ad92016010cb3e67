"""Native kernels. Each kind of device has its own folder."""

ACTIVATION_GROUP = 128  # inputs that share a scale of INT8 activations where the weight has no groups
