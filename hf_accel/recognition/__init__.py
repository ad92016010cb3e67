"""Is this code what we know? Before a fast path takes the place of code, one of these says that it may.

`module_code` and `source` read the code of a module. `trial` runs it beside ours on random input. `stand_ins` are
what it runs with where each of its steps has to be known. `unchanged` says whether a module is as it was when it was
recognised, and whether somebody watches it.
"""
