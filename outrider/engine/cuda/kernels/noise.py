"""The noise of coupled sampling, and scores of noise and logits.

The hash computes the integers of `engine.sampling.noise`; uint32 products wrap as its masks do.
"""

import triton
import triton.language as tl

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= tl.full([], 0x21F0AAAD, tl.uint32)
    x ^= x >> 15
    x *= tl.full([], 0x735A2D97, tl.uint32)
    return x ^ (x >> 15)


@triton.jit
def _hash(keys_ptr, position, token):
    """Hash a token at a position with two keys: uint32."""
    position = position.to(tl.uint32)
    first = _mix(tl.load(keys_ptr).to(tl.uint32) ^ position)
    second = _mix(tl.load(keys_ptr + 1).to(tl.uint32) ^ position)
    return _mix((_mix(token.to(tl.uint32)) ^ first) + second)


@triton.jit
def gumbel_noise(keys_ptr, position, token):
    """Return the noise of some tokens of a row: float64."""
    uniform = (_hash(keys_ptr, position, token).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def over(logits, temperature):
    """Divide logits by the temperature: float32, rounded as torch does."""
    return tl.math.div_rn(logits.to(tl.float32), temperature)


@triton.jit
def exact_scores(logits, temperature, keys_ptr, position, token):
    """Return logit / temperature + noise of some tokens of a row: float64."""
    return over(logits, temperature).to(tl.float64) + gumbel_noise(keys_ptr, position, token)


@triton.jit
def _log2(x, ASM: tl.constexpr):
    """Return log2 in one instruction, with an error of 2^-22 at most, or that share of it."""
    if not ASM:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rough_scores(logits, temperature, keys_ptr, position, token, ASM: tl.constexpr):
    """Approximate `exact_scores` in float32, to about 1e-6 of noise and the rounding of sums.

    A uniform close to 1 is given by its distance x from 1, and its logarithm by the series in x.
    """
    hashed = _hash(keys_ptr, position, token)
    low = hashed < 2147483648
    x = (tl.where(low, hashed, 4294967295 - hashed).to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    series = 1.0 / 4 + x * (1.0 / 5 + x * (1.0 / 6))
    series = x * (1.0 + x * (1.0 / 2 + x * (1.0 / 3 + x * series)))
    exponential = -_LN2 * _log2(tl.where(low, x, 1.0 - x), ASM)
    exponential = tl.where(low | (x > 0.0625), exponential, series)
    return logits.to(tl.float32) / temperature - _LN2 * _log2(exponential, ASM)


@triton.jit
def nearly(ahead):
    """Return the least rough score of the best token if the best rough score is `ahead`."""
    return ahead - 1e-3 - 2**-20 * tl.minimum(tl.abs(ahead), 3e38)


@triton.jit
def better(
    best,  # float64: the highest score so far
    chosen,  # int32: the lowest token with it
    ahead,  # float32: the highest rough score so far
    rough,  # float32, of other tokens
    token,
    logits_ptr,
    temperature,
    keys_ptr,
    position,
):
    """Update `best`, `chosen` and `ahead` with these tokens, except scores of -inf."""
    first = tl.max(rough, axis=0)
    ahead = tl.maximum(ahead, first)
    while (first >= nearly(ahead)) & (first > -float("inf")):  # nearly always once
        one = tl.min(tl.where(rough == first, token, 2147483647), axis=0)
        score = exact_scores(tl.load(logits_ptr + one), temperature, keys_ptr, position, one)
        wins = (score > best) | ((score == best) & (one < chosen))
        chosen = tl.where(wins, one, chosen)
        best = tl.where(wins, score, best)
        rough = tl.where(token == one, -float("inf"), rough)
        first = tl.max(rough, axis=0)
    return best, chosen, ahead


@triton.jit
def order(x):
    """Map float32 numbers to int64 in the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def unorder(order):
    """Invert `order`."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rank(score, token):
    """Rank float32 scores as int64; of equal scores the lowest token ranks highest."""
    return (order(score) << 32) | (0x7FFFFFFF - token)


@triton.jit
def unrank(ranked):
    """Return the score and the token of a rank."""
    return unorder(ranked >> 32), 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32)
