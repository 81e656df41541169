"""Frames conform, whatever the columns come as."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from dtprobe.readers.schema import COMMON, Schema, SchemaError

SCHEMA = Schema("made", {"count": "Int64", "share": "Float64", "done": "boolean", "text": "string"})


def test_an_empty_frame_has_all_columns_and_dtypes() -> None:
    frame = SCHEMA.check(SCHEMA.empty())
    assert len(frame) == 0 and list(frame.columns) == [*COMMON, "count", "share", "done", "text"]
    assert [str(dtype) for dtype in frame.dtypes[-4:]] == ["Int64", "Float64", "boolean", "string"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        ([1, None, 2**62], ["a", None, ""]),
        (pl.Series([1, None, 2**62]), pl.Series(["a", None, ""])),
        (pa.array([1, None, 2**62]), pa.array(["a", None, ""])),
        (pa.chunked_array([[1], [None, 2**62]]), pa.chunked_array([["a"], [None, ""]])),
        (pd.array([1, None, 2**62], dtype="Int64"), pd.array(["a", None, ""], dtype="string")),
        (pd.Series([1, None, 2**62], dtype="Int64"), np.array(["a", None, ""], dtype=object)),
    ],
    ids=["list", "polars", "arrow", "chunks", "pandas arrays", "series"],
)
def test_columns_come_as_lists_polars_arrow_or_pandas(count: object, text: object) -> None:
    frame = SCHEMA.check(SCHEMA.frame({"count": count, "text": text, "done": True, "kind": "x", "share": 0.5}))
    assert frame["count"].isna().tolist() == [False, True, False] and frame["count"][2] == 2**62
    assert frame["text"].isna().tolist() == [False, True, False] and frame["text"][2] == ""
    assert frame["done"].tolist() == [True] * 3 and frame["kind"].tolist() == ["x"] * 3 and frame["share"].tolist() == [0.5] * 3
    assert frame["host"].isna().all() and frame["t_ns"].isna().all()


def test_frames_can_be_written_to_joined_and_filtered() -> None:
    frame = SCHEMA.frame({"count": np.arange(3), "text": pl.Series(["a", "b", None])})
    both = pd.concat([frame, SCHEMA.frame({"count": [7]})], ignore_index=True)
    both.loc[0, "count"] = 5
    both.loc[0, "text"] = "z"
    assert SCHEMA.check(both)["count"].tolist() == [5, 1, 2, 7]
    assert both[both["text"] == "z"]["count"].tolist() == [5]
    assert both.groupby("text")["count"].sum().to_dict() == {"b": 1, "z": 5}


def test_a_constant_over_many_rows_shares_its_memory() -> None:
    frame = SCHEMA.frame({"count": np.arange(300_000), "text": "a long path " * 10})
    assert frame["text"].iloc[[0, -1]].tolist() == ["a long path " * 10] * 2
    buffers = {chunk.buffers()[2].address for chunk in pa.chunked_array(frame["text"].array.__arrow_array__()).chunks}
    assert len(buffers) == 1


def test_text_without_utf8_form_is_escaped() -> None:
    assert SCHEMA.frame({"text": ["a\ud800"]})["text"].tolist() == ["a\\ud800"]
    assert SCHEMA.frame({"text": "a\udcff", "count": [1]})["text"].tolist() == ["a\\udcff"]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"other": [1]}, "unknown columns"),
        ({"count": [1], "share": [1.0, 2.0]}, "several lengths"),
        ({"count": ["x"]}, r"made\.count: not Int64"),
        ({"count": [2**64]}, r"made\.count: not Int64"),
        ({"text": [5]}, r"made\.text: not string"),
    ],
)
def test_what_does_not_conform_is_named(columns: dict, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        SCHEMA.frame(columns)


def test_check_names_what_differs() -> None:
    frame = SCHEMA.empty()
    with pytest.raises(
        SchemaError, match="missing \\['text'\\], unknown \\['arm'\\], wrong \\['count is float64, not Int64'\\]"
    ):
        SCHEMA.check(frame.drop(columns="text").astype({"count": "float64"}).assign(arm=1))
    SCHEMA.check(frame.assign(arm="control", repeat=1), "arm", "repeat")
    with pytest.raises(SchemaError, match="dtypes \\['int'\\]"):
        Schema("bad", {"x": "int"})
