"""/tokenize and /detokenize, as vLLM has them: the tokens that the model gets for a text or a chat, and their text."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from ..api_errors import ApiError
from ..text_bodies import DetokenizeBody, TokenizeBody
from .handlers import OfEngine


class Tokenize(OfEngine):
    """Answers with the tokens of a text, or of a chat by the model's template."""

    body_type = TokenizeBody

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        asked: TokenizeBody = self._checked(body)
        asked.check()
        service = self.service
        if asked.prompt is None:
            ids = (await self._render(asked, body["messages"], body.get("tools"))).ids
        else:
            prompt, special = asked.prompt, asked.add_special_tokens is not False
            ids = await service.in_thread(lambda: service.ids(prompt, add_special_tokens=special))
        found: dict[str, Any] = {"count": len(ids), "max_model_len": service.context, "tokens": ids}
        if asked.return_token_strs:
            found["token_strs"] = service.tokenizer.convert_ids_to_tokens(ids)
        return JSONResponse(found)


class Detokenize(OfEngine):
    """Answers with the text of tokens, special ones too."""

    body_type = DetokenizeBody

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        asked: DetokenizeBody = self._checked(body)
        tokenizer = self.service.tokenizer
        if max(asked.tokens, default=0) >= len(tokenizer):
            message = f"tokens holds {max(asked.tokens)}, and the tokenizer has {len(tokenizer)} tokens"
            raise ApiError(400, message, field="tokens")
        return JSONResponse({"prompt": await self.service.in_thread(lambda: tokenizer.decode(asked.tokens))})
