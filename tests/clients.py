"""Load generators that people have, against `infersim serve`: each one's own report beside infersim's records.

    python tests/clients.py guidellm PATH/bin/guidellm
    python tests/clients.py aiperf PATH/bin/aiperf
    python tests/clients.py vllm PATH/bin/vllm

PATH: a virtual environment with guidellm 0.8.1, aiperf 0.13 or vllm (they are too large for every run of the tests).
Then `infersim validate` reads the client's file. Exit code 1 where counts differ, or means by more than 3 ms and 2 %.
"""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from endpoint import endpoint

from infersim.serve.text import WORDS

MODEL, REQUESTS, RATE, OUTPUT = "Llama-3.1-8B", 60, 6, 40
ABSOLUTE, RELATIVE = 3.0, 0.02  # ms, share


def prompts(folder):
    """Prompts of 20 to 400 words, one a line in two forms."""
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(20, 400))) for _ in range(REQUESTS)]
    file = folder / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": text, "text": text, "output_tokens_count": OUTPUT}) + "\n" for text in texts)
    )
    return file


def tokenizer(folder):
    """A Hugging Face tokenizer whose tokens are the words of answers, for clients that want one; no network."""
    vocab = {"<unk>": 0} | {f"\u0120{word}": i for i, word in enumerate(WORDS, 1)}
    parts = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    whole |= {"pre_tokenizer": parts, "post_processor": None, "decoder": parts, "model": model}
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(whole))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": 131072}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(about))
    return str(folder / "tokenizer")


def guidellm(program, folder, url):
    file, out = prompts(folder), folder / "measured.json"
    command = [
        program,
        "run",
        "--backend",
        f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions",
    ]
    command += ["--profile", f"kind=constant,rate={RATE}", "--data", f"kind=json_file,path={file}"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={out}"]
    subprocess.run([*command, "--disable-console-interactive"], check=True, stdout=sys.stderr)
    run = json.loads(out.read_text())["benchmarks"][0]
    rows = run["requests"]["successful"]
    metrics = {name: run["metrics"][name]["successful"]["mean"] for name in
               ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")}  # fmt: skip
    means = {"ttft": metrics["time_to_first_token_ms"], "itl": metrics["inter_token_latency_ms"]}
    means["e2el"] = metrics["request_latency"] * 1e3
    counts = (len(rows), sum(row["prompt_tokens"] for row in rows), sum(row["output_tokens"] for row in rows))
    return out, counts, means


def aiperf(program, folder, url):
    command = [program, "profile", "--model", MODEL, "--url", url, "--endpoint-type", "completions", "--streaming"]
    command += ["--tokenizer", tokenizer(folder), "--use-server-token-count", "--input-file", str(prompts(folder))]
    command += ["--custom-dataset-type", "single_turn", "--request-count", str(REQUESTS), "--request-rate", str(RATE)]
    command += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", f"max_tokens:{OUTPUT}", "--ui-type", "simple"]
    subprocess.run([*command, "--artifact-dir", str(folder / "aiperf")], check=True, stdout=sys.stderr)
    out = next((folder / "aiperf").rglob("profile_export_aiperf.json"))
    run = json.loads(out.read_text())
    means = {"ttft": run["time_to_first_token"]["avg"], "itl": run["inter_token_latency"]["avg"]}
    means["e2el"] = run["request_latency"]["avg"]
    totals = (run["request_count"]["avg"], *(run[f"total_{kind}"]["avg"] for kind in ("isl", "osl")))
    return out.with_name("profile_export.jsonl"), tuple(int(one) for one in totals), means


def vllm(program, folder, url):
    out = folder / "measured.json"
    command = [program, "bench", "serve", "--base-url", url, "--model", MODEL]
    command += ["--tokenizer", tokenizer(folder)]
    command += ["--dataset-name", "random", "--random-input-len", "200", "--random-output-len", str(OUTPUT)]
    command += ["--num-prompts", str(REQUESTS), "--request-rate", str(RATE), "--ignore-eos", "--save-result"]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el"]
    command += ["--save-detailed", "--result-dir", str(folder), "--result-filename", out.name]
    subprocess.run(command, check=True, stdout=sys.stderr)
    run = json.loads(out.read_text())
    means = {"ttft": run["mean_ttft_ms"], "itl": run["mean_itl_ms"], "e2el": run["mean_e2el_ms"]}
    return out, (run["completed"], run["total_input_tokens"], run["total_output_tokens"]), means


def records(folder, number):
    """Counts and means of the last `number` requests: a client's first ones may be its own trials."""
    with open(folder / "out" / "requests.csv", newline="") as file:
        rows = list(csv.DictReader(file))[-number:]
    columns = {name: np.array([float(row[name]) for row in rows]) for name in
               ("prompt_tokens", "output_tokens", "ttft_ms", "e2el_ms")}  # fmt: skip
    gaps = (columns["e2el_ms"] - columns["ttft_ms"]).sum() / (columns["output_tokens"] - 1).sum()
    counts = (len(rows), int(columns["prompt_tokens"].sum()), int(columns["output_tokens"].sum()))
    return counts, {"ttft": columns["ttft_ms"].mean(), "itl": gaps, "e2el": columns["e2el_ms"].mean()}


def main():
    name, program = sys.argv[1:]
    client = {"guidellm": guidellm, "aiperf": aiperf, "vllm": vllm}[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with endpoint("--out", str(folder / "out"), stdout=subprocess.PIPE, text=True) as (server, port):
            file, counts, means = client(program, folder, f"http://127.0.0.1:{port}")
            server.send_signal(signal.SIGINT)
            print(server.communicate(timeout=60)[0].splitlines()[-1])
        own_counts, own = records(folder, counts[0])
        print(f"requests, prompt tokens, output tokens: {name} {counts}, infersim {own_counts}")
        wrong = counts != own_counts
        for what, value in means.items():
            apart = value - own[what]
            wrong |= abs(apart) > max(ABSOLUTE, RELATIVE * own[what])
            print(f"mean {what}: {name} {value:.2f} ms, infersim {own[what]:.2f} ms, apart {apart:+.2f} ms")
        print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
        command = [sys.executable, "-m", "infersim", "validate", str(file), "--scenario", "llama-8b-h100"]
        wrong |= subprocess.run(command, check=False).returncode != 0
    sys.exit(int(wrong))


if __name__ == "__main__":
    main()
