"""The table of `test_table.py`: every public function x {eager, compiled} x layouts x meshes x dtypes.

cells       one mode, mesh, layout and dtype, and what the oracle starts from there
left_out    the cells that are not run, and why
row         a public function: its calls, what every rank should get, what it must refuse
buffers, movement, reductions, transforms, programs, plans
            the rows by theme
rows        all of them
rank        the inputs of a rank, and all cells of a mesh run on it
comparison  what was found against what was expected, and what would have to be noticed
"""
