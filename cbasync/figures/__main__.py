"""`python -m cbasync.figures FOLDER` writes all figures into a folder."""

import sys

from cbasync.figures import write_figures

if __name__ == "__main__":
    write_figures(sys.argv[1])
