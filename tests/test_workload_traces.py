"""Readers of public trace formats, on small files made here in each format, and on broken ones."""

import gzip
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from infersim.config.errors import InputError
from infersim.config.workload import Format, Workload
from infersim.workload.build import build_requests
from infersim.workload.formats import FORMATS
from infersim.workload.requests import Requests
from infersim.workload.trace import spread_ticks

ROWS = [(10.0, 1300, 7), (10.5, 20, 1), (12.25, 513, 300)]
"""arrival in s, prompt and output tokens"""


def csv(header: str, line: Callable[[float, int, int], str], end: str = "\n") -> str:
    return end.join([header, *(line(*row) for row in ROWS)]) + end


def json_lines(line: Callable[[float, int, int], dict]) -> str:
    return "".join(json.dumps(line(*row)) + "\n" for row in ROWS)


def azure(t: float, prompt: int, output: int) -> str:
    date = datetime(2023, 11, 16, 18, 59, 50) + timedelta(seconds=t)
    return f"{date:%Y-%m-%d %H:%M:%S.%f}0,{prompt},{output}"


def ids(prompt: int, block: int) -> list[int]:
    return list(range(-(-prompt // block)))


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Model,Request tokens,Response tokens,Total tokens,Log Type"
SAMPLES = {
    "azure": csv(AZURE, azure),
    "azure as published": csv(AZURE, azure, "\r\n").rstrip() + "\r\n\r\n" + azure(13, 5, 6),
    "azure 2024": csv(AZURE, lambda t, p, o: azure(t, p, o).replace(",", "+00:00,", 1)),
    "mooncake": json_lines(
        lambda t, p, o: {"timestamp": t * 1000, "input_length": p, "output_length": o, "hash_ids": ids(p, 512)}
    ),
    "bailian": json_lines(
        lambda t, p, o: {"chat_id": 1, "timestamp": t, "input_length": p, "output_length": o, "hash_ids": ids(p, 16)}
    ),
    "burstgpt 1": csv(f"Timestamp,{BURSTGPT}", lambda t, p, o: f"{t},GPT-4,{p},{o},{p + o},API log"),
    "burstgpt 3": csv(
        f"Timestamp,Session ID,Elapsed time,{BURSTGPT}", lambda t, p, o: f"{t},,1.5,GPT-4,{p},{o},{p + o},API log"
    ),
    "vidur": csv("arrived_at,num_prefill_tokens,num_decode_tokens", lambda t, p, o: f"{t},{p},{o}"),
    "llmservingsim csv": csv("input_toks,output_toks,arrival_time_ns", lambda t, p, o: f"{p},{o},{int(t * 1e9)}"),
    "llmservingsim": json_lines(
        lambda t, p, o: {"input_toks": p, "output_toks": o, "arrival_time_ns": int(t * 1e9), "input_tok_ids": [1]}
    ),
    "aibrix csv": csv("timestamp_ms,prompt_length,output_length", lambda t, p, o: f"{int(t * 1000)},{p},{o}"),
    "aibrix": json_lines(
        lambda t, p, o: {"timestamp": t * 1000, "requests": [{"Prompt Length": p, "Output Length": o, "prompt": "x"}]}
    ),
    "splitwise": csv(
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size",
        lambda t, p, o: f"0,2,0,{t},1,{p},{o}",
    ),
    "plain": csv(" arrival_s, prompt_tokens ,output_tokens", lambda t, p, o: f"{t}, {p}, {o}"),
}


def read(folder: Path, content: str | bytes, name: str = "trace", **keys) -> Requests:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return build_requests(Workload.validate({"trace": name} | keys, "w.yaml"), 0, folder)


def problems(folder: Path, content: str | bytes, **keys) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(folder, content, **keys)
    assert all("\n" not in line and len(line) < 400 for line in caught.value.problems)
    return [line.removeprefix(f"{folder}/trace: ") for line in caught.value.problems]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("sample", SAMPLES)
def test_each_format_is_recognised_and_read(tmp_path, sample, zipped):
    content = SAMPLES[sample].encode()
    r = read(tmp_path, gzip.compress(content) if zipped else content)
    n = len(ROWS)
    assert r.arrival[:n] == pytest.approx([0, 0.5, 2.25], abs=1e-7)
    assert r.prompt_tokens[:n].tolist() == [prompt for _, prompt, _ in ROWS]
    assert r.output_tokens[:n].tolist() == [output for _, _, output in ROWS]
    assert r.request_id.tolist() == list(range(len(r)))
    assert len(r) == n + (sample == "azure as published")
    assert r.notes == ()


def test_the_names_of_the_description_and_of_the_readers_agree():
    assert {row.name for row in FORMATS} | {"servegen"} == set(Format.__args__)


@pytest.mark.parametrize(("sample", "block"), [("mooncake", 512), ("bailian", 16)])
def test_hash_ids_become_segments_as_long_as_the_prompt(tmp_path, sample, block):
    r = read(tmp_path, SAMPLES[sample])
    for i, (_, prompt, _) in enumerate(ROWS):
        here = slice(r.segment_offsets[i], r.segment_offsets[i + 1])
        assert r.segment_ids[here].tolist() == ids(prompt, block)
        lengths = r.segment_lengths[here]
        assert lengths.sum() == prompt
        assert set(lengths[:-1]) <= {block}
    assert len(r.segment_ids) == r.segment_offsets[-1]


def test_time_scale_stretches_time(tmp_path):
    assert read(tmp_path, SAMPLES["plain"], time_scale=2).arrival.tolist() == [0, 1, 4.5]


def test_num_requests_takes_the_first_and_keeps_their_ids_and_segments(tmp_path):
    whole = read(tmp_path, SAMPLES["mooncake"])
    part = read(tmp_path, SAMPLES["mooncake"], num_requests=2)
    assert np.array_equal(part.arrival, whole.arrival[:2])
    assert np.array_equal(part.request_id, whole.request_id[:2])
    assert np.array_equal(part.segments[0], whole.segments[0][:2])
    assert np.array_equal(part.segments[1], whole.segments[1][:2])
    assert np.array_equal(part.segment_lengths, whole.segment_lengths)


def test_asking_for_more_requests_than_there_are_is_said(tmp_path):
    r = read(tmp_path, SAMPLES["plain"], num_requests=5)
    assert len(r) == 3
    assert r.notes == ("the trace has 3 requests, fewer than num_requests: 5",)


def test_a_request_rate_replaces_the_times_of_the_trace_and_is_said(tmp_path):
    r = read(tmp_path, SAMPLES["plain"], request_rate=3)
    assert r.arrival[-1] == 1.0
    assert r.notes == ("request_rate replaces the trace's arrivals",)


def test_lengths_without_times_need_a_request_rate(tmp_path):
    lengths = "num_prefill_tokens,num_decode_tokens\n100,5\n200,6\n"
    assert problems(tmp_path, lengths) == ["no arrival times (column arrived_at); add request_rate to the workload"]
    assert read(tmp_path, lengths, request_rate=2).prompt_tokens.tolist() == [100, 200]


def test_failed_requests_of_burstgpt_are_left_out_counted_and_keep_their_row(tmp_path):
    text = f"Timestamp,{BURSTGPT}\n5,ChatGPT,472,18,490,x\n45,ChatGPT,9,0,9,x\n118,GPT-4,417,276,693,x\n"
    r = read(tmp_path, text)
    assert r.request_id.tolist() == [0, 2]
    assert r.arrival.tolist() == [0, 113]
    assert r.notes == ("1 of the trace's 3 requests generated nothing (they failed) and are left out",)


def test_one_line_of_aibrix_is_as_many_requests(tmp_path):
    one = {"Prompt Length": 5, "Output Length": 6}
    text = (
        json.dumps({"timestamp": 1000, "requests": [one, one]})
        + "\n"
        + json.dumps({"timestamp": 3000, "requests": [one]})
    )
    assert read(tmp_path, text).arrival.tolist() == [0, 0, 2]


def test_ticks_are_spread_evenly_and_in_order():
    """Requests stay inside their tick, in their order, and the first of a tick stays where it is."""
    ticks = np.repeat([0.0, 3.0, 5.999, 12.0], [3, 1, 2, 2])
    assert spread_ticks(ticks, 3.0) == pytest.approx([0, 1, 2, 3, 5.999, 7.499, 12, 13.5])


def test_times_finer_than_a_tick_stay():
    times = np.array([0, 0, 0.25, 3])
    assert np.array_equal(spread_ticks(times, 3.0), times)


def test_spreading_is_said(tmp_path):
    lines = [{"timestamp": t, "input_length": 5, "output_length": 5, "hash_ids": [0]} for t in (0, 0, 3000)]
    r = read(tmp_path, "\n".join(map(json.dumps, lines)))
    assert r.arrival.tolist() == [0, 1.5, 3]
    assert r.notes == ("the trace's times stand in ticks of 3 s: requests are spread inside each",)
    assert read(tmp_path, "\n".join(map(json.dumps, lines)), num_requests=2).arrival.tolist() == [0, 1.5]


PLAIN = "arrival_s,prompt_tokens,output_tokens\n"
LONG = "arrival_s,prompt_tokens,output_tokens\n" + "1,2,3\n" * 1000
MOON = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": '


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "empty; a trace has at least one request"),
        (b"", "empty"),
        (" \n\n", "empty"),
        (gzip.compress(b""), "empty"),
        (PLAIN, "only a header"),
        (gzip.compress(LONG.encode())[:-20], "the gzip file is cut short"),
        (b"\x1f\x8b" + b"\x00" * 50, "the gzip file is damaged"),
        (b"\xff\xfe\x00" * 9, "byte 0 is not UTF-8 text"),
        (
            PLAIN.replace("prompt", "promt") + "1,2,3\n",
            "format plain needs prompt_tokens (columns found: arrival_s",
        ),
        ("a,b\n1,2\n", "format plain needs prompt_tokens and output_tokens (columns found: a, b; f"),
        (PLAIN + "0,5,6\n1,x,6\n2,y,6\n", "line 3: prompt_tokens must be a number (got 'x') and 1 more like it"),
        (PLAIN + "0,5,6\n\n1,,6\n", "line 4: prompt_tokens must be a number (got nothing)"),
        (PLAIN + "0,5\n", "line 2: output_tokens must be a number (got nothing)"),
        (PLAIN + "0,5,6,7\n", "line 2: has 4 cells for the 3 columns of the header"),
        (PLAIN + "0,5,6\n2e9,5,6\n", "workload: requests arrive over 2e+09 s"),
        (PLAIN.replace(",", ";") + "0;5;6\n", "one column, "),
        ("x," + PLAIN.replace("\n", ",x\n"), "line 1: the header has 'x' twice"),
        (MOON.replace('"output_length"', '"output"') + "[0, 1]}\n", "format mooncake needs output_length (columns"),
        (PLAIN + "0,nan,6\n", "line 2: prompt_tokens must be a number (got 'nan')"),
        (PLAIN + "inf,5,6\n", "line 2: arrival_s must be a number (got 'inf')"),
        (PLAIN + "0,-5,6\n", "line 2: prompt_tokens must be a whole number from 1 to 1e+09 (got '-5')"),
        (PLAIN + "0,5,0\n", "line 2: output_tokens must be a whole number from 1"),
        (PLAIN + "0,5,1e12\n", "line 2: output_tokens must be a whole number from 1"),
        (PLAIN + "0,5.5,6\n", "line 2: prompt_tokens must be a whole number from 1"),
        (PLAIN + "0,5,6\n9,5,6\n8,5,6\n", "line 4: arrival_s goes back in time ('8' after '9'); sort the file by it"),
        (AZURE + "\n2023-11-16 18:00:01,5,6\n\n2023-11-16 18:00:00,5,6\n", "line 4: TIMESTAMP goes back in time"),
        (AZURE + "\nyesterday at noon,5,6\n", "line 2: TIMESTAMP must be a date such as 2023-11-16"),
        (AZURE + "\n5,5,6\n", "line 2: TIMESTAMP must be a date such as 2023-11-16"),
        (f"Timestamp,{BURSTGPT}\n5,x,9,0,9,x\n", "every Response tokens is 0"),
        ("{broken\n", "line 1: not JSON"),
        (MOON + "[0, 1]}\n7\n", "line 2: must be one JSON object per line (got 7)"),
        (
            MOON + "[0, 1]}\n" + MOON.replace("600", "null") + "[0]}",
            "line 2: input_length must be a number (got nothing)",
        ),
        (MOON + "[0, 1, 2]}\n", "line 1: hash_ids has 3 blocks of 512 tokens, more than 600 tokens fill"),
        (MOON + "5}\n", "line 1: hash_ids must be a list of whole numbers"),
        (MOON + '["a"]}\n', "line 1: hash_ids must be a list of whole numbers"),
        ('{"timestamp": 1, "requests": []}\n', "every list of requests is empty"),
        ('{"timestamp": 1, "requests": [3]}\n', "format aibrix needs Prompt Length and Output Length"),
        ('{"session_id": 1, "sub_requests": []}\n', "line 1: sub_requests must be a list of requests, each a mapping"),
        ("[" * 100_000, "a JSON list, no trace"),
        ('[{"conversations": [{"from": "human"}]}]\n', "a JSON list, no trace"),
        ('{"a":' * 100_000, "line 1: not JSON"),
    ],
)
def test_a_broken_trace_is_one_line_that_says_where(tmp_path, content, line):
    found = problems(tmp_path, content)
    assert len(found) == 1
    assert found[0].startswith(line)


def test_several_broken_columns_are_reported_together(tmp_path):
    found = problems(tmp_path, PLAIN + "0,x,6\n1,5,-6\nz,5,6\n")
    assert [line.split(" must")[0] for line in found] == [
        "line 2: prompt_tokens",
        "line 3: output_tokens",
        "line 4: arrival_s",
    ]


def test_a_given_format_names_the_column_that_it_misses(tmp_path):
    line = problems(tmp_path, PLAIN + "0,5,6\n", format="azure")[0]
    assert line.startswith("format azure needs ContextTokens and GeneratedTokens (columns found: arr")


def test_broken_bytes_never_give_a_traceback(tmp_path):
    """Cut, doubled and changed bytes of every sample: requests or lines, nothing else."""
    random = np.random.default_rng(0)
    for sample in SAMPLES.values():
        for _ in range(60):
            data = bytearray(sample.encode())
            for at in random.integers(0, len(data), random.integers(1, 6)):
                data[at] = random.choice(list(b'0-9.,"{}[]:\n x\x00\xff'))
            start, end = sorted(random.integers(0, len(data), 2))
            kinds = [bytes(data), bytes(data[:end]), bytes(data[start:]), gzip.compress(bytes(data))[: end + 20]]
            try:
                r = read(tmp_path, kinds[random.integers(4)])
            except InputError:
                continue
            assert np.all(np.diff(r.arrival) >= 0)
            assert min(r.prompt_tokens.min(), r.output_tokens.min()) >= 1


def test_a_missing_file_lists_near_names(tmp_path):
    (tmp_path / "azure_conv.csv.gz").touch()
    with pytest.raises(InputError, match=r"workload.trace: 'azure_conv.csv': no such file; did you mean azure_conv"):
        build_requests(Workload.validate({"trace": "azure_conv.csv"}, "w.yaml"), 0, tmp_path)


def test_what_cannot_be_a_path_is_no_such_file(tmp_path):
    for trace in ("\0", "x" * 5000):
        with pytest.raises(InputError, match="no such file"):
            build_requests(Workload.validate({"trace": trace}, "w.yaml"), 0, tmp_path)


def test_a_trace_beside_the_scenario_comes_before_one_in_the_current_folder(tmp_path, monkeypatch):
    here, base = tmp_path / "here", tmp_path / "base"
    here.mkdir()
    base.mkdir()
    (here / "trace").write_text(PLAIN + "0,1,1\n")
    monkeypatch.chdir(here)
    w = Workload.validate({"trace": "trace"}, "w.yaml")
    assert build_requests(w, 0, base).prompt_tokens.tolist() == [1]
    (base / "trace").write_text(PLAIN + "0,2,1\n")
    assert build_requests(w, 0, base).prompt_tokens.tolist() == [2]
