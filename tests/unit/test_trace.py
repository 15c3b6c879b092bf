"""Reading and making length traces: what is accepted, how each mistake is named, what generators promise."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import trace_of

from stream_balancer.errors import TraceError
from stream_balancer.tools.length_models import PRESETS, LengthModel, generate_trace
from stream_balancer.tools.trace import Trace, load_trace

HEADER = "group_id,prompt_tokens,output_tokens"

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str | bytes, name: str = "lengths.csv") -> Path:
        path = tmp_path / name
        raw = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return path

    return write_file


class TestLoad:
    @pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
    def test_plain_and_gzipped(self, write: Write, name: str) -> None:
        trace = load_trace(write(f"{HEADER}\np1,10,20\np1,10,0\np2,0,5\n", name))
        assert trace.prompt_tokens.tolist() == [10, 10, 0]
        assert trace.output_tokens.tolist() == [20, 0, 5]
        assert trace.lengths.tolist() == [30, 10, 5]
        assert trace.group_ids.tolist() == [0, 0, 1]
        assert trace.arrival_s is None
        assert (trace.name, len(trace), trace.num_groups, trace.num_tokens) == ("a", 3, 2, 45)

    def test_columns_by_name_in_any_order_and_extra_ones_ignored(self, write: Write) -> None:
        text = 'note,output_tokens,arrival_seconds,group_id,prompt_tokens\n"a, ""b""",7,1.5,x,3\n,8,1.5,y,4\n'
        trace = load_trace(write(text))
        assert trace.lengths.tolist() == [10, 12]
        assert trace.arrival_s is not None
        assert trace.arrival_s.tolist() == [1.5, 1.5]

    def test_what_other_tools_write(self, write: Write) -> None:
        """A byte-order mark, Windows line ends, blank lines, integers written as floats, no last line end."""
        trace = load_trace(write("\ufeffgroup_id, prompt_tokens ,output_tokens\r\n\r\n1,2.0,3e1\r\n\r\n2,4,5"))
        assert trace.lengths.tolist() == [32, 9]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "",
                "line 0: no column group_id, prompt_tokens, output_tokens; the file has nothing. The first",
            ),
            ("\n\n", "the file has nothing"),
            (HEADER, "has column names but no rows"),
            ("group_id,prompt_tokens\n1,2", "line 1: no column output_tokens; the file has group_id, prompt_tokens."),
            ("prompt_tokens,output_tokens\n1,2", "no column group_id.*the row's number will do"),
            ("1,2,3\n4,5,6", "line 1: no column group_id, prompt_tokens, output_tokens; the file has 1, 2, 3."),
            (HEADER + ",output_tokens\n1,2,3,4", "line 1: two columns are called output_tokens. Rename one"),
            (
                HEADER + "\n1,2,3\n1,-2,3",
                r"line 3: Expected `int` >= 0 - at `\$.prompt_tokens`: .*'-2'.* Drop the row or",
            ),
            (HEADER + "\n1,2,3\n1,2,-3.0", "line 3: Expected `int` >= 0"),
            (HEADER + "\n1,2,many", r"line 2: Expected `int`, got `str` - at `\$.output_tokens`: .*'many'"),
            (HEADER + "\n1,2,", "line 2: Expected `int`"),
            (HEADER + "\n1,nan,3", "line 2: Expected `int`"),
            (HEADER + "\n1,inf,3", "line 2: Expected `int`"),
            (HEADER + "\n1,2.5,3", "line 2: Expected `int`"),
            (HEADER + "\n1,2,4000000000", "line 2: Expected `int` <= 2147483647"),
            (HEADER + "\n1,1e300,4", "line 2: Expected `int`"),
            (HEADER + "\n1,0,0", r"line 2: a rollout without tokens \(prompt_tokens \+ output_tokens is 0\)"),
            (HEADER + "\n1,2", "line 2: 2 fields, but the first line names 3 columns"),
            (HEADER + "\n1,2,3,4", "line 2: 4 fields, but the first line names 3 columns"),
            (HEADER + ',note\n1,2,3,"a\nb"\n1,2,x,c', "line 4: Expected `int`"),
            (HEADER + ",arrival_seconds\n1,2,3,5\n1,2,3,4.5", "line 3: arrival_seconds is 4.5 after 5. Sort"),
            (HEADER + ",arrival_seconds\n1,2,3,", "line 2: Expected `float`"),
            (HEADER + ",arrival_seconds\n1,2,3,nan", "line 2: arrival_seconds is nan after -inf. Sort"),
            (HEADER.encode() + b"\n\xff\xfe,1,2", "line 2: is not UTF-8 text"),
            (HEADER + '\n"' + "x" * 200_000 + '",1,2', "is not CSV"),
        ],
    )
    def test_every_mistake_is_named_with_file_and_line(self, write: Write, text: str | bytes, message: str) -> None:
        path = write(text)
        with pytest.raises(TraceError, match=message) as caught:
            load_trace(path)
        assert str(caught.value).startswith(str(path))

    def test_a_gzip_cut_short_or_damaged(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv.gz"
        whole = gzip.compress((HEADER + "\n1,2,3" * 1000).encode())
        path.write_bytes(whole[:-20])
        with pytest.raises(TraceError, match=r"damaged or cut short.*Fetch it again"):
            load_trace(path)
        path.write_bytes(whole[:12] + b"\xff" * 20 + whole[32:])
        with pytest.raises(TraceError, match="damaged or cut short"):
            load_trace(path)

    @given(st.text(st.characters(codec="utf-8"), max_size=200))
    def test_any_text_loads_or_is_refused_by_name(self, folder: Path, text: str) -> None:
        for body in (text, f"{HEADER}\n{text}"):
            (path := folder / "f.csv").write_text(body, newline="")
            found: Trace | TraceError
            try:
                found = load_trace(path)
            except TraceError as error:
                found = error
            assert (found.lengths >= 1).all() if isinstance(found, Trace) else str(found).startswith(str(path))


class TestTrace:
    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"output_tokens": [1, 2]}, r"columns must all be \[n\]"),
            ({"prompt_tokens": [], "output_tokens": [], "group_ids": []}, "no rollouts"),
            ({"output_tokens": [-1]}, "negative lengths"),
            ({"prompt_tokens": [0], "output_tokens": [0]}, "a rollout without tokens"),
            ({"arrival_s": [math.nan]}, "arrival_s must be finite and never decrease"),
        ],
    )
    def test_columns_that_do_not_fit(self, kwargs: dict[str, list[float]], message: str) -> None:
        good = {"prompt_tokens": [1], "output_tokens": [1], "group_ids": [0]}
        columns = {name: np.array(value) for name, value in (good | kwargs).items()}
        with pytest.raises(TraceError, match=message):
            Trace(**columns)  # type: ignore[arg-type]

    def test_resampled_by_group_keeps_siblings_together_under_new_labels(self) -> None:
        trace = trace_of([1, 2, 3, 4, 5, 6], groups=[0, 1, 0, 1, 2, 2], arrival=[0.0] * 6)
        drawn = trace.resampled(1000, seed=3)
        assert len(drawn) == 1000
        assert drawn.arrival_s is None
        lengths = drawn.lengths.tolist()
        allowed = [[1, 3], [2, 4], [5, 6]]
        for label in range(drawn.num_groups - 1):
            assert [lengths[i] for i in np.flatnonzero(drawn.group_ids == label)] in allowed
        assert drawn.resampled(10, seed=1).num_groups == 5


class TestGenerate:
    @pytest.mark.parametrize("name", [name for name in PRESETS if name != "lognormal"])
    def test_presets_have_the_moments_they_were_fitted_to(self, name: str) -> None:
        model = PRESETS[name]
        trace = generate_trace(60_000, name, seed=4)
        free = LengthModel(
            mu=model.mu, sigma_between=model.sigma_between, sigma_within=model.sigma_within, siblings=model.siblings
        )
        logs = np.log(generate_trace(60_000, free, seed=4).output_tokens).reshape(-1, model.siblings)
        assert logs.mean() == pytest.approx(model.mu, abs=0.05)
        within = logs.std(axis=1, ddof=1)
        assert math.sqrt((within**2).mean()) == pytest.approx(model.sigma_within, abs=0.03)
        between = logs.mean(axis=1).var() - model.sigma_within**2 / model.siblings
        assert math.sqrt(between) == pytest.approx(model.sigma_between, abs=0.04)
        assert trace.lengths.min() >= 1
        assert trace.output_tokens.max() == model.cap

    @pytest.mark.parametrize(
        ("changes", "rule"),
        [
            ({"mu": math.nan}, "mu must be finite"),
            ({"sigma_within": -1.0}, "spreads must be finite and >= 0"),
            ({"cap": 3, "floor": 4}, "1 <= floor <= cap"),
            ({"floor": 0}, "1 <= floor <= cap"),
            ({"cap_share": 0.1}, "cap_share needs a cap"),
            ({"cap": 9, "cap_share": 1.5}, r"cap_share must be in 0\.\.1"),
            ({"siblings": 0}, "siblings must be >= 1"),
        ],
    )
    def test_a_model_that_describes_no_lengths(self, changes: dict[str, float], rule: str) -> None:
        with pytest.raises(ValueError, match=rule):
            LengthModel(**({"mu": 5.0, "sigma_between": 1.0, "sigma_within": 1.0} | changes))  # type: ignore[arg-type]
