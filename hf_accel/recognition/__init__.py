"""Recognition of code: what is this module, and may this pass go fast?

`code` reads a module's code. `trial` runs it and ours on the same random input. `trace` runs a layer's code with
`stand_ins`, where each `operation` has to be known. `unchanged` says whether a module has changed since it was
recognised, and whether a hook watches it: then its own code runs.
"""
