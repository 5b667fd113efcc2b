"""Write scikit-learn's measurements of breast tumours as a Parquet table: ``python -m examples.table.make_table FILE``.

The table has thirty columns of numbers, one of text (``size``), and the diagnosis, which is to be predicted.
"""

from __future__ import annotations

import sys

import pandas as pd
from sklearn.datasets import load_breast_cancer


def make_table() -> pd.DataFrame:
    """Return the table, one row for each tumour."""
    found = load_breast_cancer(as_frame=True)
    table = found.data.copy()
    table["size"] = pd.cut(table["mean radius"], [0, 12, 16, 100], labels=["small", "middle", "large"]).astype(str)
    table["diagnosis"] = found.target_names[found.target]
    return table


if __name__ == "__main__":
    make_table().to_parquet(sys.argv[1])
