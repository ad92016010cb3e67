"""/v1/embeddings, /v1/rerank and /v1/score: vectors of texts, and scores of two, computed without generating."""

from __future__ import annotations

import asyncio
import base64
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, ClassVar, Protocol

import torch
from starlette.responses import JSONResponse, Response
from torch import Tensor, nn

from ..checkpoints.text_encoder import TextRow
from ..errors import HfAccelError
from .api_errors import ApiError, unavailable
from .bodies import read_body
from .formats import Named
from .limits import Limits
from .row_queue import RowQueue, RowRequest
from .service import RETRY_SECONDS, ModelService, exchange
from .text_bodies import EmbeddingBody, RerankBody, RowBody, ScoreBody


class RowMaker(Protocol):
    """It computes rows: a TextEncoder, or what transcribes sounds. max_tokens: of a row."""

    model: Any
    tokenizer: Any
    max_tokens: int

    @property
    def takes_batches(self) -> bool: ...

    def compute(self, rows: Sequence[Any]) -> Iterable[Any]: ...


class RowJob:
    """A request inside the server. It counts as one choice, however many texts it has."""

    num_choices = 1

    def __init__(self, service: RowService) -> None:
        self._service, self.since = service, monotonic()
        self.request: RowRequest[Any] | None = None

    def cancel(self) -> None:
        if self.request is not None:
            self.request.cancel()

    def close(self) -> None:
        self.cancel()
        self._service.metrics.request_seconds.observe(monotonic() - self.since)
        self._service.admission.leave(self)


class RowService(ModelService):
    """A model that makes vectors or scores of texts, or texts of sounds, by a queue of rows.

    most_rows: of a pass.
    """

    def __init__(self, encoder: RowMaker, name: str, limits: Limits, *, most_rows: int | None = None) -> None:
        most = min(limits.max_running, most_rows or limits.max_running) if encoder.takes_batches else 1
        super().__init__(RowQueue(encoder.model, encoder.compute, max_rows=most), encoder.tokenizer, name, limits)
        self.encoder: Any = encoder

    @property
    def context(self) -> int:
        most: int = self.encoder.max_tokens
        return min(most, self.limits.max_prompt_tokens or most)

    async def rows(self, asked: RowBody, read: Callable[[int | None], Sequence[TextRow]]) -> Sequence[TextRow]:
        """Return the rows that `read` makes, which gets the tokens that may be kept of each text.

        Raises ApiError: 400 for a text that is too long or cannot be read, 429 or 503 where none is taken now.
        """
        self.require_ready(1)
        most, cut = self.context, asked.truncate_prompt_tokens
        if cut is not None and cut > most:
            raise ApiError(400, f"truncate_prompt_tokens={cut} is more than the {most} tokens that the model takes")
        try:
            rows = await self.in_thread(lambda: read(most if cut == -1 else cut))
        except ApiError:
            raise
        except Exception as error:  # such as half of a surrogate pair, which JSON can name and UTF-8 cannot
            raise ApiError(400, "a text cannot be read by the tokenizer") from error
        longest = max(map(len, rows))
        if longest > most:
            message = (
                f"a text has {longest} tokens, and the model takes {most}; send truncate_prompt_tokens=-1 to cut it"
            )
            raise ApiError(400, message)
        if not min(map(len, rows)):
            raise ApiError(400, "a text has no tokens; send at least one")
        return rows

    async def compute(self, rows: Sequence[Any]) -> list[Any]:
        """Return what the model makes of the rows. Raises ApiError: 429 if there is no room, 503, 500 if it failed."""
        job = RowJob(self)
        self.admission.admit(job)
        exchange.get().callback(job.close)
        try:
            job.request = self.engine.submit(rows)
            self.metrics.prompt_tokens.inc(sum(map(len, rows)))
            found: list[Any] = await asyncio.wrap_future(job.request.future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the client is gone
                raise
            raise unavailable("the server is shutting down, and nothing was computed", RETRY_SECONDS) from None
        except HfAccelError as error:
            raise unavailable(str(error), RETRY_SECONDS) from error
        except Exception as error:
            raise self.failure(error) from error
        return found


# -- endpoints -----------------------------------------------------------------------------------------


class RowHandler:
    """Answers the requests of one path."""

    body_type: ClassVar[type[Named]]

    def __init__(self, service: RowService) -> None:
        self.service = service

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """Answer a request. Raises ApiError for what is not served."""
        asked = read_body(self.body_type, body, ignore_unknown=self.service.limits.ignore_unknown_fields)
        return await self._answer(asked, request_id)

    @abstractmethod
    async def _answer(self, asked: Any, request_id: str) -> Response: ...

    def _usage(self, rows: Sequence[TextRow]) -> dict[str, int]:
        tokens = sum(map(len, rows))
        return {"prompt_tokens": tokens, "total_tokens": tokens}


class Embeddings(RowHandler):
    """Answers with a vector for each text."""

    body_type = EmbeddingBody

    async def _answer(self, asked: EmbeddingBody, request_id: str) -> Response:
        encoder, name = self.service.encoder, asked.prompt_name
        if name is not None and name not in encoder.prompts:
            known = ", ".join(encoder.prompts) or "none"
            raise ApiError(400, f"prompt_name={name[:100]!r} is no prompt of the model; it has {known}")

        def read(cut: int | None) -> list[TextRow]:
            return [
                encoder.row(one, prompt=name, cut=cut) if isinstance(one, str) else TextRow(self._ids(one)[:cut])
                for one in asked.inputs
            ]

        rows = await self.service.rows(asked, read)
        vectors = torch.stack(await self.service.compute(rows))
        if asked.dimensions is not None:
            if asked.dimensions > vectors.shape[1]:
                raise ApiError(400, f"dimensions={asked.dimensions}: the model's vectors have {vectors.shape[1]}")
            vectors = vectors[:, : asked.dimensions]
            vectors = nn.functional.normalize(vectors, dim=-1) if encoder.normalizes else vectors
        return await asyncio.to_thread(self._written, vectors, asked, self._usage(rows))

    def _ids(self, ids: list[int]) -> list[int]:
        size = self.service.encoder.model.get_input_embeddings().num_embeddings
        if max(ids) >= size:
            raise ApiError(400, f"input names the token {max(ids)}, and the model has {size}", field="input")
        return ids

    def _written(self, vectors: Tensor, asked: EmbeddingBody, usage: dict[str, int]) -> Response:
        written: list[Any] = vectors.tolist()
        if asked.encoding_format == "base64":
            written = [base64.b64encode(one.numpy().astype("<f4").tobytes()).decode() for one in vectors]
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(written)]
        return JSONResponse({"object": "list", "data": data, "model": self.service.name, "usage": usage})


class OfPairs(RowHandler):
    """Scores two texts: by the head of a cross-encoder, or by the cosine of their vectors, as vLLM does it."""

    async def _scores(self, asked: RowBody, pairs: Sequence[tuple[str, str]]) -> tuple[list[float], dict[str, int]]:
        encoder = self.service.encoder
        if encoder.scores:
            rows = await self.service.rows(asked, lambda cut: [encoder.row(a, b, cut=cut) for a, b in pairs])
            return [float(score) for score in await self.service.compute(rows)], self._usage(rows)
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        rows = await self.service.rows(asked, lambda cut: [encoder.row(text, cut=cut) for text in texts])
        vectors = dict(
            zip(texts, nn.functional.normalize(torch.stack(await self.service.compute(rows)), dim=-1), strict=True)
        )
        return [float(vectors[a] @ vectors[b]) for a, b in pairs], self._usage(rows)


class Rerank(OfPairs):
    """Answers with the documents, the best one first."""

    body_type = RerankBody

    async def _answer(self, asked: RerankBody, request_id: str) -> Response:
        texts = asked.texts
        scores, usage = await self._scores(asked, [(asked.query, text) for text in texts])
        order = sorted(range(len(texts)), key=lambda place: -scores[place])[: asked.top_n or None]
        results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores[place]} for place in order]
        if asked.return_documents is not False:
            results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
        head = {"id": f"rerank-{request_id}", "model": self.service.name}
        return JSONResponse({**head, "usage": usage, "results": results})


class Score(OfPairs):
    """Answers with a score for each two texts."""

    body_type = ScoreBody

    async def _answer(self, asked: ScoreBody, request_id: str) -> Response:
        scores, usage = await self._scores(asked, asked.pairs)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{request_id}", "object": "list", "created": int(time.time()), "model": self.service.name}
        return JSONResponse({**head, "data": data, "usage": usage})
