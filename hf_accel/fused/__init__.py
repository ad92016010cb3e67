"""Native calls for the operations between projections, and for whole layers.

Each module is recognized by the structure of its code, not by a list of class names, and checked on random input. It
then gets a class of its own, whose forward falls back to the original's wherever the native call does not apply.
"""
