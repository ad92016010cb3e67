"""Compiles what an answer must match: JSON schemas, regular expressions, grammars and choices, by llguidance."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from ...errors import UnsupportedError
from ..sampling.constraint import Constraint, only_allowed, short
from .request_config import end_ids

KEYWORDS = ("response_format", "regex", "grammar", "choice")
MOST_CHARACTERS = 2**18  # of a schema, regex or grammar
MOST_KEPT = 64  # compiled ones
# What one schema may cost: about two seconds of a thread to compile, some 20 ms for a mask, and 100 MB.
LIMITS = {"initial_lexer_fuel": 250_000, "max_lexer_states": 50_000}
MOST_PAIRS = 4_000_000  # of properties of an object: the time that these take grows with their square
MOST_TRIPLES = 8_000_000  # of patterns of properties of an object: these take time by their cube
MOST_RULES = 1000  # of a grammar, or $ref of a schema: one that names the next takes stack, which ends at about 2,500
MOST_REMAINDERS = 100_000  # of numbers: multipleOf takes a state for each
# JSON is written as json.dumps does, so that most of what is no value can be drafted. A keyword that is not known to
# llguidance is an error, as is a oneOf whose branches may overlap.
JSON = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False,
    "coerce_one_of": False,
}  # fmt: skip


class Grammars:
    """Compiles constraints for one tokenizer, and keeps those that were asked for last. Any thread may use it.

    ends: the ids of the tokens that end a text. Raises UnsupportedError if llguidance is missing, and for a tokenizer
    that is no fast one.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int]) -> None:
        self._library = _library()
        self._tokenizer = self._library.LLTokenizer(_written(tokenizer), eos_token=list(ends) or None)
        self._compiled: OrderedDict[tuple[str, str], Constraint] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, kind: str, text: str) -> Constraint:
        """Return a new constraint for one answer. kind: json, regex, grammar or choice.

        Raises UnsupportedError, with what is wrong, for a text that cannot be compiled, or only with too much work.
        """
        with self._lock:
            found = self._compiled.get((kind, text))
        if found is None:
            found = self._made(kind, text)
        with self._lock:
            self._compiled[kind, text] = found
            self._compiled.move_to_end((kind, text))
            while len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
            return found.fork()

    def _made(self, kind: str, text: str) -> Constraint:
        if len(text) > MOST_CHARACTERS:
            raise UnsupportedError(f"{_NAMES[kind]} has {len(text)} characters; at most {MOST_CHARACTERS} are taken")
        library = self._library
        _check_cost(_NAMES[kind], *_parts(kind, text))
        try:
            if kind == "json":
                grammar = library.LLMatcher.grammar_from_json_schema(text, overrides=JSON)
            else:
                grammar = library.grammar_from(kind, text)
            limits = library.LLParserLimits(verbose_errors=False, **LIMITS)
            matcher = library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        except Exception as error:  # llguidance raises of several kinds for what it cannot read
            raise UnsupportedError(f"{_NAMES[kind]} cannot be used: {short(str(error))}") from None
        if matcher.is_error():
            raise UnsupportedError(f"{_NAMES[kind]} cannot be used: {short(matcher.get_error())}")
        made = Constraint(matcher)
        first = matcher.compute_bitmask()
        if matcher.is_error() or not any(first):
            raise UnsupportedError(f"{_NAMES[kind]} cannot be used: no text, or none within the limits, matches it")
        made.mask([])  # which is the slowest, and is the same for all answers
        return made


def _parts(kind: str, text: str) -> tuple[list[Any], int]:
    """Return the JSON schemas in what is to be compiled, and the number of rules, at most, that stand around them."""
    if kind == "json":
        return [json.loads(text)], 0
    found, rest = [], ""
    while kind == "grammar" and (begin := text.find("%json")) >= 0:
        rest, text = rest + text[:begin], text[begin + 5 :].lstrip()
        with contextlib.suppress(ValueError, RecursionError):  # llguidance says what is wrong
            schema, end = json.JSONDecoder().raw_decode(text)
            found.append(schema)
            text = text[end:]
    return found, (rest + text).replace("::=", ":").count(":") if kind == "grammar" else 0


def _check_cost(name: str, schemas: list[Any], rules: int) -> None:
    """Raise UnsupportedError for schemas that llguidance would compile for longer than its own limits say."""
    pairs, triples, remainders, common, left = 0, 0, 0, 1, list(schemas)
    while left:
        value = left.pop()
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if isinstance(value, dict):
            rules += "$ref" in value
            if isinstance(inner := value.get("properties"), dict):
                pairs += len(inner) ** 2
            if isinstance(inner := value.get("patternProperties"), dict):
                triples += len(inner) ** 3
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float) and not isinstance(multiple, bool) and math.isfinite(multiple):
                parts = Decimal(str(multiple)).normalize().as_tuple()
                number = int("".join(map(str, parts.digits))) * 10 ** max(0, int(parts.exponent))
                remainders, common = remainders + number, math.lcm(common, max(1, number))
    if pairs > MOST_PAIRS:
        raise UnsupportedError(f"{name} cannot be used: its objects have too many properties; at most 2000 are taken")
    if rules > MOST_RULES:
        raise UnsupportedError(f"{name} cannot be used: it has {rules} rules or $ref; at most {MOST_RULES} are taken")
    if triples > MOST_TRIPLES:
        raise UnsupportedError(
            f"{name} cannot be used: its objects have too many patternProperties; at most 200 are taken"
        )
    if max(remainders, common) > MOST_REMAINDERS:
        raise UnsupportedError(
            f"{name} cannot be used: its multipleOf have {max(remainders, common)} remainders together; at most "
            f"{MOST_REMAINDERS} are taken"
        )


_NAMES = {"json": "response_format", "regex": "regex", "grammar": "grammar", "choice": "choice"}
_known: WeakKeyDictionary[Any, dict[tuple[int, ...], Grammars]] = WeakKeyDictionary()
_lock = threading.Lock()


def grammars_of(tokenizer: Any, ends: Iterable[int]) -> Grammars:
    """Return the Grammars of a tokenizer, which are made once: a large vocabulary takes a second or two."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        what = "none is given" if tokenizer is None else f"{type(tokenizer).__name__} is none"
        raise UnsupportedError(
            f"response_format=, regex=, grammar=, choice= need a fast tokenizer for the text of tokens, and {what}; "
            "pass tokenizer=AutoTokenizer.from_pretrained(...)"
        )
    with _lock:
        made = _known.setdefault(tokenizer, {})
        key = (len(tokenizer), *sorted(set(ends)))
        if key not in made:
            made[key] = Grammars(tokenizer, key[1:])
        return made[key]


def _library() -> Any:
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise UnsupportedError(
            "response_format=, regex=, grammar= and choice= need the package llguidance, which cannot be imported "
            f'({error}); pip install "hf_accel[structured]"'
        ) from None


def _written(tokenizer: Any) -> str:
    """Return a tokenizer as JSON in which all added tokens but spaces are special: no text is written with them."""
    backend = copy.copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    text: str = backend.to_str()
    added = tokenizer.added_tokens_decoder.values()
    if all(token.special or not token.content.strip(" \t\r\n▁") for token in added):
        return text
    given = json.loads(text)
    for token in given["added_tokens"]:
        token["special"] = bool(token["special"] or token["content"].strip(" \t\r\n▁"))
    return json.dumps(given)


# -- what is asked for --------------------------------------------------------------------------------


def asked_text(given: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the kind and the text of what an answer must match; None if it may be any text.

    given: the keywords response_format (as in OpenAI's API: {"type": "text"}, {"type": "json_object"}, or
    {"type": "json_schema", "json_schema": {"schema": ...}}, or a class of pydantic), regex, grammar (Lark or GBNF) and
    choice (texts), None where left out. Raises UnsupportedError for two of them, and for other forms.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    if not asked:
        return None
    if len(asked) > 1:
        raise UnsupportedError(f"{' and '.join(f'{name}=' for name in asked)} are given; an answer can match one")
    ((name, value),) = asked.items()
    if name == "response_format":
        return _json(value)
    if name == "choice":
        texts = [value] if isinstance(value, str) else list(value)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise UnsupportedError(f"choice={value!r} must be texts, at least one, and none of them empty")
        return "choice", json.dumps(texts)
    if not isinstance(value, str) or not value:
        raise UnsupportedError(f"{name}={value!r} must be a text that is not empty")
    return name, value


def _json(value: Any) -> tuple[str, str] | None:
    if callable(getattr(value, "model_json_schema", None)):
        schema: Any = value.model_json_schema()
    else:
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind == "text":
            return None
        inner = {"schema": {"type": "object"}} if kind == "json_object" else value
        if kind == "json_schema":  # /v1/responses writes the fields of json_schema next to the type
            inner = value.get("json_schema", value)
        if kind not in ("json_object", "json_schema") or not isinstance(inner, Mapping) or "schema" not in inner:
            raise UnsupportedError(
                f"response_format={_shown(value)} must be {{'type': 'json_object'}}, {{'type': 'json_schema', "
                "'json_schema': {'schema': {...}}}, {'type': 'text'} or a class of pydantic"
            )
        schema = inner["schema"]
    if schema is True:  # which draft 2020-12 has for any value
        schema = {}
    if not isinstance(schema, dict):
        what = "allows no value; leave it out" if schema is False else f"must be an object, not {_shown(schema)}"
        raise UnsupportedError(f"the schema of response_format {what}")
    try:
        return "json", json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is no JSON: {error}"
        raise UnsupportedError(f"the schema of response_format {reason}") from None


def _shown(value: Any) -> str:
    return repr(value)[:200]


def constraint_for(tokenizer: Any, config: Any, given: Mapping[str, Any]) -> Constraint | None:
    """Return what the answer of a request must match; None for any text.

    config: the GenerationConfig, whose eos_token_id end it. given: see asked_text.
    """
    asked = asked_text(given)
    if asked is None:
        return None
    return grammars_of(tokenizer, end_ids(config)).constraint(*asked)


def take_constraint(model: Any, given: dict[str, Any], config: Any = None) -> Constraint | None:
    """Take the keywords of asked_text out of those of a call, and return what its answers must match.

    given: may have the tokenizer that reads them, and the eos_token_id. config: that of the call, if it has one.
    """
    asked = {name: given.pop(name) for name in KEYWORDS if name in given}
    own = config if isinstance(config, GenerationConfig) else model.generation_config
    if given.get("eos_token_id") is not None:
        own = GenerationConfig(eos_token_id=given["eos_token_id"])
    return constraint_for(given.get("tokenizer"), own, asked)


def apply_constraint(model: Any, given: dict[str, Any], positional: tuple[Any, ...]) -> None:
    """Replace the keywords of asked_text in a call of generate() by a logits processor.

    positional: its arguments without a name, of which the second one is a GenerationConfig.
    """
    constraint = take_constraint(model, given, given.get("generation_config", (*positional, None, None)[1]))
    if constraint is not None:
        if given.get("cache_implementation") == "paged":  # generate_batch() is called with the config alone
            raise UnsupportedError(
                "cache_implementation='paged' takes no response_format=, ...; call generate_batch()"
            )
        own = given.get("logits_processor") or ()
        given["logits_processor"] = LogitsProcessorList([*own, ConstraintProcessor(constraint)])


# -- transformers' generate() -------------------------------------------------------------------------


class ConstraintProcessor(LogitsProcessor):
    """Applies a constraint to each row in transformers' loop, and where rows advance together.

    It is asked for the first time about the prompts, behind which the answers begin. What it gives depends on the
    tokens of a row alone, whatever was asked before.
    """

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self._rows: list[Constraint] = []
        self._begin: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        begin = self._begin = input_ids.shape[1] if self._begin is None else self._begin
        while len(self._rows) < len(input_ids):
            self._rows.append(self.constraint.fork())
        answers = input_ids[:, begin:].tolist()
        return only_allowed(scores, [_mask(row, answer) for row, answer in zip(self._rows, answers, strict=False)])


def _mask(row: Constraint, answer: list[int]) -> bytes | None:
    """Return which tokens may follow an answer; behind one that is complete, only the end, as often as it is asked."""
    found = row.mask(answer)
    return row.mask(answer[: row.follow(answer)]) if found is None else found


def constraint_in(processors: Iterable[Any]) -> Constraint | None:
    """Return the constraint that one of these processors applies; None if none does."""
    return next((each.constraint for each in processors if isinstance(each, ConstraintProcessor)), None)
