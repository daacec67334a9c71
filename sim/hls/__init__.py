"""The same expert the usual way: hls4ml and da4ml beside this project's arithmetic and hardware.

:mod:`.expert` is what is compared, :mod:`.csim` runs it through hls4ml, :mod:`.adders` through da4ml, :mod:`.sizes`
says what parts hold. ``make hls4ml`` puts them together; docs/hls4ml.md has the results.
"""
