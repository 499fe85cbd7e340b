"""Read the output that a client expects, in tokens."""

from __future__ import annotations

from gateway.intake import Intake
from gateway.openai.request_objects import ExtraConfig, within
from gateway.openai.requests import Request
from gateway.openai.translation import named
from outrider.errors import InvalidRequestError
from outrider.params import MAX_REFERENCES, Advice, TokenIds, require

_REFERENCES = "speculation.references"
_NAMES = {"min_token_match": "sp_min_token_match", "max_token_match": "sp_max_token_match"}


async def read_advice(body: Request, intake: Intake) -> Advice:
    """From `prediction`, `extra_config` and `speculation.references`.

    A prediction is followed through changes (`edit`) unless `extra_config.sp_edit` says otherwise.
    Raises `InvalidRequestError`.
    """
    extra = body.extra_config or ExtraConfig()
    edit = body.prediction is not None if extra.sp_edit is None else bool(extra.sp_edit)
    default = Advice()
    least = (
        default.min_token_match if extra.sp_min_token_match is None else extra.sp_min_token_match
    )
    most = max(least, default.max_token_match)
    token_ids = await _expected(body, extra, intake)
    references = await _references(body, intake)
    try:
        with named(_NAMES):
            advice = Advice(
                token_ids=token_ids,
                edit=edit,
                references=references,
                min_token_match=least,
                max_token_match=(
                    most if extra.sp_max_token_match is None else extra.sp_max_token_match
                ),
            )
    except InvalidRequestError as error:
        raise within("extra_config", error) from error
    intake.check_advice(advice, "extra_config.sp_advice_prompt_token_ids", _REFERENCES)
    return advice


async def _expected(body: Request, extra: ExtraConfig, intake: Intake) -> TokenIds:
    texts = {
        "prediction": None if body.prediction is None else body.prediction.text,
        "extra_config.sp_advice_prompt": extra.sp_advice_prompt,
    }
    given = [(param, text) for param, text in texts.items() if text is not None]
    if len(given) + (extra.sp_advice_prompt_token_ids is not None) > 1:
        raise InvalidRequestError(
            "Give one of prediction, extra_config.sp_advice_prompt and "
            "extra_config.sp_advice_prompt_token_ids.",
            param="prediction" if body.prediction is not None else "extra_config.sp_advice_prompt",
        )
    for param, text in given:
        return await intake.encode_plain(text, param)
    return tuple(extra.sp_advice_prompt_token_ids or ())


async def _references(body: Request, intake: Intake) -> tuple[TokenIds, ...]:
    sources = (body.speculation.references if body.speculation is not None else None) or []
    require(len(sources) <= MAX_REFERENCES, _REFERENCES, f"at most {MAX_REFERENCES}")
    return tuple(
        [
            await intake.encode_plain(source, _REFERENCES)
            if isinstance(source, str)
            else tuple(source)
            for source in sources
        ]
    )
