"""Clients that people have, against `infersim serve`: what they report is what it did."""

import asyncio
import json

import numpy as np
import pytest
from served import MODEL, Served, idle, scenario

from infersim.serve.text import Estimate

TOOL = {"name": "look", "description": "d", "input_schema": {"type": "object"}}


def openai_client(served):
    openai = pytest.importorskip("openai")
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", timeout=60, max_retries=0)


def test_openais_responses_and_embeddings():
    """The package's own types take what comes, whole and streamed; counts are those of the text."""

    async def ask(served):
        async with openai_client(served) as client:
            more = {"model": MODEL, "max_output_tokens": 9, "extra_body": {"ignore_eos": True}}
            whole = await client.responses.create(input="tell me more", instructions="be short", **more)
            assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert whole.usage.output_tokens == len(Estimate().encode(whole.output_text)) == 9
            events = [one async for one in await client.responses.create(input="tell me more", stream=True, **more)]
            kinds = [one.type for one in events]
            assert kinds[:4] == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
            ]
            assert kinds[4:13] == ["response.output_text.delta"] * 9
            assert kinds[-1] == "response.incomplete"
            assert [one.sequence_number for one in events] == list(range(len(events)))
            said = "".join(one.delta for one in events if one.type == "response.output_text.delta")
            assert events[-1].response.output_text == said
            async with client.responses.stream(input="of", **more) as stream:
                assert len([one async for one in stream if one.type == "response.output_text.delta"]) == 9
            tool = {"type": "function", "name": "look", "parameters": {}, "strict": False}
            call = await client.responses.create(input="of", tools=[tool], tool_choice="required", **more)
            assert (call.output[0].type, call.output[0].name) == ("function_call", "look")
            assert json.loads(call.output[0].arguments)["text"]
            found = await client.embeddings.create(model=MODEL, input=["a", "b c", "a"], dimensions=64)
            vectors = np.array([one.embedding for one in found.data])
            assert vectors.shape == (3, 64)
            np.testing.assert_array_equal(vectors[0], vectors[2])
            np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
            assert found.usage.prompt_tokens == sum(len(Estimate().encode(one)) for one in ("a", "b c", "a"))
            floats = await client.embeddings.create(model=MODEL, input="a", dimensions=64, encoding_format="float")
            np.testing.assert_allclose(floats.data[0].embedding, vectors[0], rtol=1e-5)

    with Served(scenario()) as served:
        asyncio.run(ask(served))
        idle(served)


def test_anthropics_messages():
    """By hand, event by event; with the package where it is installed."""
    with Served(scenario()) as served:
        chat = {
            "model": MODEL,
            "max_tokens": 7,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "of"}]}],
        }
        whole = served.post("/v1/messages", **chat, system="be short", ignore_eos=True)
        assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
        assert whole["usage"]["output_tokens"] == 7 == len(Estimate().encode(whole["content"][0]["text"]))
        counted = served.post("/v1/messages/count_tokens", model=MODEL, messages=chat["messages"], system="be short")
        assert counted["input_tokens"] == whole["usage"]["input_tokens"]
        data = served.ask("POST", "/v1/messages", chat | {"stream": True, "ignore_eos": True})[1].decode()
        pieces = [piece.split("\n") for piece in data.strip().split("\n\n")]
        events = [(head.removeprefix("event: "), json.loads(body.removeprefix("data: "))) for head, body in pieces]
        assert all(kind == body["type"] for kind, body in events)
        middle = ["content_block_delta"] * 7
        ends = ["content_block_stop", "message_delta", "message_stop"]
        assert [kind for kind, _ in events] == ["message_start", "content_block_start", *middle, *ends]
        assert events[-2][1]["usage"]["output_tokens"] == 7
        call = served.post("/v1/messages", **chat, tools=[TOOL], tool_choice={"type": "any"}, ignore_eos=True)
        assert (call["content"][0]["type"], call["content"][0]["name"], call["stop_reason"]) == (
            "tool_use",
            "look",
            "tool_use",
        )
        for wrong, status, kind in (
            ({"max_tokens": None}, 400, "invalid_request_error"),
            ({"model": "x"}, 404, "not_found_error"),
        ):
            got, data, _ = served.ask("POST", "/v1/messages", chat | wrong)
            assert (got, json.loads(data)["error"]["type"]) == (status, kind)
        idle(served)
        anthropic = pytest.importorskip("anthropic")
        client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{served.port}", api_key="none")
        with client, client.messages.stream(**chat) as stream:
            said = "".join(stream.text_stream)
            assert stream.get_final_message().usage.output_tokens == len(Estimate().encode(said))


def test_llm_d_inference_sims_admin_config():
    """Drop-in: the shares and kinds of failure are set and read by its names; what it cannot mean here is refused."""
    with Served(scenario()) as served:
        assert (
            served.post("/admin/config", **{"failure-injection-rate": 100, "failure-types": ["rate_limit"]})["model"]
            == MODEL
        )
        assert served.ask("POST", "/v1/completions", {"prompt": "a"})[0] == 429
        about = json.loads(served.ask("GET", "/admin/config")[1])
        assert (about["failure-injection-rate"], about["failure-types"]) == (100, ["rate_limit"])
        served.post("/admin/config", **{"failure-injection-rate": 0})
        assert served.ask("POST", "/v1/completions", {"prompt": "a"})[0] == 200
        for wrong in (
            {"time-to-first-token": "1s"},
            {"failure-injection-rate": 101},
            {"failure-types": ["x"]},
            {"failure-types": 3},
        ):
            assert served.ask("POST", "/admin/config", wrong)[0] == 400
        assert served.ask("GET", "/health/ready")[0] == 200
        assert served.ask("POST", "/v1/completions", {"prompt": "a"}, {"X-Return-Error": "x"})[0] == 400
