"""Recognition of code: is this what we know? Before a fast path replaces code, one of these modules says that it may.

`module_code` and `source` read the code of a module. `trial` runs it and ours on the same random input. `stand_ins`
are its inputs where each of its operations has to be known. `unchanged` says whether a module has changed since it was
recognised, and whether a hook watches it.
"""
