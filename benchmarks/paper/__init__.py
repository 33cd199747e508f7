"""The tables and figures of the H2O paper (arXiv 2306.14048), one command each: `reproduce.py`."""
