"""Small servers of the two protocols, in a thread of the test's process, whose tokens and faults a test scripts.

They answer in the form of vLLM 0.32 (as its CPU build answers) and of SGLang (as its documentation and its
`http_server.py` say), with the endpoints that the engine uses. Weights are a number: the name of the folder that was
loaded last. An answer's tokens are those that `reply` gives for the prompt and these weights.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.vllm_server import free_port
from unspool.engines.meaning import SAMPLED_FROM, LogprobMeaning

CONTEXT = 1000
KEY = "a key for tests"

Fault = Callable[["FakeServer", Request], Awaitable[Response | None]]


@dataclass(eq=False)
class Job:
    """A generation under way."""

    rid: str
    tokens: list[int] = field(default_factory=list)
    begun: bool = False
    end: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


def count_up(prompt: list[int], weights: str) -> list[int]:
    """Ten tokens from the last of the prompt on, then 2, the stop token."""
    return [*range(prompt[-1] + 1, prompt[-1] + 11), 2]


class FakeServer:
    """A server; `start` returns when it answers. A context manager.

    `block_after` n holds every generation after its n-th token until `go()`, an abort, or a pause.
    """

    def __init__(
        self,
        *,
        reply: Callable[[list[int], str], list[int]] = count_up,
        meaning: LogprobMeaning = SAMPLED_FROM,
        developer: bool = True,
        metrics: bool = True,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.reply = reply
        self.meaning = meaning
        self.developer = developer
        self.metrics = metrics
        self.faults: list[Fault] = []
        self.bodies: list[dict[str, Any]] = []
        self.probes: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.aborted: list[str] = []
        self.hung_up: list[str] = []
        self.waiting = 0
        self.healthy = True
        self.frozen = False
        self.refuses_weights = False
        self.may_load = threading.Event()
        self.may_load.set()
        self.block_after: int | None = None
        self.seen = threading.Condition()
        self.most_running = 0
        self.connections: set[tuple[str, int]] = set()
        self._fresh()

    def _fresh(self) -> None:
        self.weights, self.tag, self.paused = "0", "default", False
        self.jobs: dict[str, Job] = {}

    # ------------------------------------------------------------------ life

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._fresh()
        config = uvicorn.Config(self.app(), host="127.0.0.1", port=self.port, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.005)
            assert self._thread.is_alive()

    def _serve(self) -> None:
        self.loop = asyncio.new_event_loop()
        with suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self._server.serve())
        self.loop.close()

    def kill(self) -> None:
        """End it as SIGKILL would: connections are reset, nothing is answered any more."""
        if not self._thread.is_alive():
            return

        def end() -> None:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            self._server.force_exit = self._server.should_exit = True

        self.loop.call_soon_threadsafe(end)
        self._thread.join()

    def soon(self, change: Callable[[], None]) -> None:
        """Change something on the server's own loop."""
        self.loop.call_soon_threadsafe(change)

    def go(self) -> None:
        """Let held generations go on, and hold none any more."""

        def change() -> None:
            self.block_after = None
            for job in self.jobs.values():
                job.changed.set()

        self.soon(change)

    def wait_for(self, what: Callable[[], bool], seconds: float = 20.0) -> None:
        """Return when something is so of what the server has seen."""
        with self.seen:
            assert self.seen.wait_for(what, seconds)

    async def has(self, what: Callable[[], bool]) -> None:
        """The same for a coroutine."""
        await asyncio.to_thread(self.wait_for, what)

    def note(self) -> None:
        with self.seen:
            self.seen.notify_all()

    # ------------------------------------------------------------------ generating

    def app(self) -> Starlette:
        raise NotImplementedError

    async def generate(self, request: Request, rid: str, prompt: list[int], limit: int, stops: list[int]) -> Job | None:
        """Run a generation to its end; None: the client hung up."""
        job = Job(rid)
        self.jobs[rid] = job
        self.most_running = max(self.most_running, len(self.jobs))
        self.note()
        work = asyncio.ensure_future(self._run(job, prompt, limit, stops))
        gone = asyncio.ensure_future(self._gone(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return job
            self.hung_up.append(rid)
            return None
        finally:
            work.cancel()
            gone.cancel()
            self.jobs.pop(rid, None)
            self.note()

    async def _gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def _run(self, job: Job, prompt: list[int], limit: int, stops: list[int]) -> None:
        while self.paused:
            job.changed.clear()
            await job.changed.wait()
        job.begun = True
        await self._held(job)
        for token in self.reply(prompt, self.weights):
            if job.end is not None:
                return
            job.tokens.append(token)
            await self._held(job)
            if job.end is None and token in stops:
                job.end = "stop"
            elif job.end is None and len(job.tokens) == limit:
                job.end = "length"
        job.end = job.end or "stop"

    async def _held(self, job: Job) -> None:
        while self.block_after is not None and len(job.tokens) >= self.block_after and job.end is None:
            job.changed.clear()
            self.note()
            await job.changed.wait()

    def logprob(self, token: int, temperature: float, top_k: int, penalty: float) -> float:
        value = -1.0 - token / 10_000
        value -= 0.5 if penalty != 1 and self.meaning.penalty else 0.0
        value *= temperature if temperature and self.meaning.temperature else 1.0
        return 0.0 if top_k == 1 and self.meaning.truncation else value

    def stop_all(self) -> None:
        for job in self.jobs.values():
            if job.begun:
                job.end = "abort"
            job.changed.set()

    def resume_all(self) -> None:
        self.paused = False
        for job in self.jobs.values():
            job.changed.set()

    async def load(self, path: str) -> None:
        self.note()
        await asyncio.to_thread(self.may_load.wait)
        self.weights = path.rsplit("/", 1)[-1]

    async def fault(self, request: Request) -> Response | None:
        if self.frozen:
            await asyncio.Event().wait()
        return await self.faults.pop(0)(self, request) if self.faults else None

    async def body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        client = request.client
        if client is not None:
            self.connections.add((client.host, client.port))
        (self.probes if len(body.get("prompt") or body.get("input_ids")) == 8 else self.bodies).append(body)
        self.note()
        return body

    async def health(self, request: Request) -> Response:
        self.paths.append(request.url.path)
        self.note()
        if self.frozen:
            await asyncio.Event().wait()
        return Response(status_code=200 if self.healthy else 503)

    def metrics_text(self, name: str) -> Response:
        if not self.metrics:
            return JSONResponse({"detail": "Not Found"}, 404)
        text = f'# HELP {name} Waiting.\n# TYPE {name} gauge\n{name}{{model_name="m"}} {float(self.waiting)}\n'
        return PlainTextResponse(text + f'{name}_by_reason{{reason="capacity"}} 77.0\n')


class FakeVLLM(FakeServer):
    """`/v1/completions` and the developer endpoints of vLLM."""

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/metrics", self.queue),
        ]
        if self.developer:
            routes += [
                Route("/pause", self.pause, methods=["POST"]),
                Route("/resume", self.resume, methods=["POST"]),
                Route("/collective_rpc", self.rpc, methods=["POST"]),
                Route("/reset_prefix_cache", self.reset, methods=["POST"]),
                Route("/update_weight_version", self.version, methods=["POST"]),
                Route("/weight_info", self.info),
            ]
        return Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        adapter = {"id": "an-adapter", "parent": "m", "max_model_len": None}
        return JSONResponse({"data": [{"id": "m", "parent": None, "max_model_len": CONTEXT}, adapter]})

    async def queue(self, request: Request) -> Response:
        self.paths.append("/metrics")
        self.note()
        return self.metrics_text("vllm:num_requests_waiting")

    async def completions(self, request: Request) -> Response:
        body = await self.body(request)
        if len(body["prompt"]) != 8 and (answer := await self.fault(request)) is not None:
            return answer
        if body["model"] not in ("m", "an-adapter"):
            message = f"The model `{body['model']}` does not exist."
            return JSONResponse({"error": {"message": message, "type": "NotFoundError", "code": 404}}, 404)
        rid = f"cmpl-{len(self.bodies)}-{len(self.probes)}-{id(body)}"
        job = await self.generate(request, rid, body["prompt"], body["max_tokens"], body["stop_token_ids"])
        return Response(status_code=499) if job is None else JSONResponse(self.answer(body, job))

    def answer(self, body: dict[str, Any], job: Job) -> dict[str, Any]:
        values = [
            self.logprob(token, body["temperature"], body["top_k"], body["repetition_penalty"]) for token in job.tokens
        ]
        tops = [{f"token_id:{token}": value} for token, value in zip(job.tokens, values, strict=True)]
        choice = {
            "index": 0,
            "text": "...",
            "logprobs": {"token_logprobs": values, "top_logprobs": tops},
            "finish_reason": job.end,
            "token_ids": job.tokens,
            "prompt_token_ids": body["prompt"],
        }
        return {"id": job.rid, "object": "text_completion", "model": body["model"], "choices": [choice]}

    async def pause(self, request: Request) -> Response:
        assert request.query_params["mode"] == "abort"
        self.paths.append("/pause")
        self.paused = True
        self.stop_all()
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.paths.append("/resume")
        self.resume_all()
        return JSONResponse({"status": "resumed"})

    async def rpc(self, request: Request) -> Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        self.paths.append("/collective_rpc")
        if self.refuses_weights:
            return JSONResponse({"error": {"message": "no such weights", "code": 500}}, 500)
        await self.load(body["kwargs"]["weights_path"])
        self.note()
        return JSONResponse({"results": [None]})

    async def reset(self, request: Request) -> Response:
        return JSONResponse({"success": True})

    async def version(self, request: Request) -> Response:
        self.tag = (await request.json())["new_version"]
        return JSONResponse({"success": True, "new_version": self.tag})

    async def info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.tag})


class FakeSGLang(FakeServer):
    """SGLang's native endpoints."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/get_model_info", self.info),
                Route("/generate", self.native, methods=["POST"]),
                Route("/metrics", self.queue),
                Route("/pause_generation", self.pause, methods=["POST"]),
                Route("/continue_generation", self.resume, methods=["POST"]),
                Route("/update_weights_from_disk", self.update, methods=["POST"]),
                Route("/abort_request", self.abort, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "root": "m", "max_model_len": CONTEXT}]})

    async def info(self, request: Request) -> Response:
        return JSONResponse({"model_path": "m", "is_generation": True, "weight_version": self.tag})

    async def queue(self, request: Request) -> Response:
        self.paths.append("/metrics")
        self.note()
        return self.metrics_text("sglang:num_queue_reqs")

    async def native(self, request: Request) -> Response:
        body = await self.body(request)
        sampling = body["sampling_params"]
        if len(body["input_ids"]) != 8 and (answer := await self.fault(request)) is not None:
            return answer
        if len(body["input_ids"]) + sampling["max_new_tokens"] > CONTEXT:
            message = "Requested token count exceeds the model's maximum context length"
            return JSONResponse({"error": {"message": message}}, 400)
        job = await self.generate(
            request, body["rid"], body["input_ids"], sampling["max_new_tokens"], sampling["stop_token_ids"]
        )
        return Response(status_code=499) if job is None else JSONResponse(self.answer(body, job))

    def answer(self, body: dict[str, Any], job: Job) -> dict[str, Any]:
        sampling = body["sampling_params"]
        values = [
            self.logprob(token, sampling["temperature"], sampling["top_k"], sampling["repetition_penalty"])
            for token in job.tokens
        ]
        triples = [[value, token, None] for token, value in zip(job.tokens, values, strict=True)]
        reasons: dict[str | None, dict[str, Any]] = {
            "stop": {"type": "stop", "matched": job.tokens[-1] if job.tokens else None},
            "length": {"type": "length", "length": len(job.tokens)},
            "abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        }
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": reasons[job.end],
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.tag,
            "completion_tokens": len(job.tokens),
        }
        if job.tokens:  # what waited in the queue has none
            meta["output_token_logprobs"] = triples
            if body["top_logprobs_num"]:
                meta["output_top_logprobs"] = [[triple] for triple in triples]
        return {"text": "...", "output_ids": job.tokens, "meta_info": meta}

    async def pause(self, request: Request) -> Response:
        assert (await request.json())["mode"] == "abort"
        self.paths.append("/pause_generation")
        self.paused = True
        self.stop_all()
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        self.paths.append("/continue_generation")
        self.resume_all()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update(self, request: Request) -> Response:
        body = await request.json()
        self.paths.append("/update_weights_from_disk")
        if self.refuses_weights:
            return JSONResponse({"success": False, "message": "no such weights", "num_paused_requests": 0}, 400)
        await self.load(body["model_path"])
        self.tag = body["weight_version"]
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def abort(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self.jobs:
            self.jobs[rid].end = "abort"
            self.jobs[rid].changed.set()
        self.note()
        return Response(status_code=200)


# ---------------------------------------------------------------------- faults


def status(code: int, message: str = "out of order", **headers: str) -> Fault:
    """Answer with a status."""

    async def fault(server: FakeServer, request: Request) -> Response:
        return JSONResponse({"error": {"message": message}}, code, headers=headers)

    return fault


def text(content: str) -> Fault:
    """Answer 200 with this body."""

    async def fault(server: FakeServer, request: Request) -> Response:
        return Response(content, media_type="application/json")

    return fault


def changed(change: Callable[[dict[str, Any]], object]) -> Fault:
    """Answer as usual, with something about the answer changed."""

    async def fault(server: FakeServer, request: Request) -> Response:
        body = server.bodies[-1]
        prompt = body.get("prompt") or body["input_ids"]
        job = Job(body.get("rid", "cmpl-x"), server.reply(prompt, server.weights), end="stop")
        answer = server.answer(body, job)  # type: ignore[attr-defined]
        change(answer)
        return JSONResponse(answer)

    return fault


async def hang(server: FakeServer, request: Request) -> Response:
    """Answer nothing until the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    server.hung_up.append("hang")
    server.note()
    return Response()


async def drop(server: FakeServer, request: Request) -> Response:
    """Break the connection in the middle of the answer."""

    class Broken(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"content-length", b"1000"), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": True})
            for connection in list(server._server.server_state.connections):
                connection.transport.abort()

    return Broken()


async def trickle(server: FakeServer, request: Request) -> Response:
    """Send a byte now and then, for ever."""

    class Slow(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"content-length", b"100000"), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            with suppress(Exception):
                for _ in range(2000):
                    await send({"type": "http.response.body", "body": b" ", "more_body": True})
                    await asyncio.sleep(0.02)

    return Slow()
