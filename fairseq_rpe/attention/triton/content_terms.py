"""The biases of one call of the Triton backend: one of positions, and terms that depend on the tokens.

Importing this module needs torch alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.core.bias import (
    Bias,
    KeyTableBias,
    PairGateBias,
    QueryKeyTableBias,
    QueryTableBias,
    SumBias,
    ToeplitzBias,
    TokenBias,
)
from fairseq_rpe.core.positions import Positions

MAX_KEY_COLUMNS = 1024  # largest table of keys: the products of each key with all columns are stored
# products of queries with vectors of a table that are stored at a time; if there are more, attention is computed in
# blocks of queries
MAX_PRODUCTS = 1 << 26


class BiasTerms(NamedTuple):
    """The terms of a bias, at most one of each type.

    Attributes:
        position: bias of positions alone, or None.
        tokens: numbers per token, or None.
        by_query: products of queries with vectors of their distance, or None.
        by_key: products of keys with vectors of their distance, or None.
    """

    position: Bias | None = None
    tokens: TokenBias | None = None
    by_query: QueryTableBias | None = None
    by_key: KeyTableBias | None = None

    @property
    def tables(self) -> list[QueryTableBias | KeyTableBias]:
        """The terms that have a table of vectors."""
        return [x for x in (self.by_query, self.by_key) if x is not None]


def separate_terms(bias: Bias | None) -> BiasTerms | None:
    """Return the terms of a bias; None for a sum with two terms of a type, or with a term that is none of these."""
    names = {ToeplitzBias: "position", TokenBias: "tokens", QueryTableBias: "by_query", KeyTableBias: "by_key"}
    if isinstance(bias, SumBias):
        terms: dict[str, Bias] = {}
        for term in _summands(bias):
            name = names.get(type(term))
            if name is None or name in terms:
                return None
            terms[name] = term
        return BiasTerms(**terms)  # type: ignore[arg-type]
    if isinstance(bias, QueryKeyTableBias | PairGateBias):
        return None
    return BiasTerms() if bias is None else BiasTerms(**{names.get(type(bias), "position"): bias})  # type: ignore[arg-type]


def _summands(bias: Bias) -> list[Bias]:
    """Return the summands of a sum, and of sums in it."""
    return [x for term in bias.terms for x in _summands(term)] if isinstance(bias, SumBias) else [bias]


def has_even_tables(terms: BiasTerms, pos: Positions) -> bool:
    """Return whether indices alone decide a pair's column of each table of vectors."""
    return pos.contiguous and all(x.step == pos.step for x in terms.tables)


def needs_blocks(terms: BiasTerms, batch: int, n: int, m: int) -> bool:
    """Return whether the products of the queries with their table are too many to be stored at a time."""
    if terms.by_query is None:
        return False
    columns = min(m, terms.by_query.num_columns - terms.by_query.origin)
    return batch * terms.by_query.query.shape[1] * n * columns > MAX_PRODUCTS


def content_tensors(terms: BiasTerms, plan: AttentionPlan, batch: int, m: int) -> dict[str, Tensor]:
    """Return the tensors of the terms that depend on the tokens, with gradients, in the order that the kernels take.

    Args:
        terms: terms whose tables are evenly spaced.
        plan: plan of the call.
        batch: number of sequences B.
        m: number of keys.

    Returns:
        query_terms (B, H, n) and key_terms (B, H, m); query_table (B, H, n, R) and key_table (B, H, m, R') float32:
        products with the vectors of distances 0 … R - 1, of which the last stands for all larger ones.
    """
    tensors: dict[str, Tensor] = {}
    if terms.tokens is not None:
        query, key = (x.expand(batch, -1, -1) for x in (terms.tokens.query, terms.tokens.key))
        tensors = {"query_terms": query, "key_terms": key}
    if terms.by_query is not None:
        tensors["query_table"] = _products(terms.by_query, terms.by_query.query, batch, m)
    if terms.by_key is not None:
        tensors["key_table"] = _products(terms.by_key, terms.by_key.key, batch, m)
    return tensors


def _products(bias: QueryTableBias | KeyTableBias, factor: Tensor, batch: int, m: int) -> Tensor:
    """Return the products (B, H, n, R) of a factor (B, H, n, E) with the vectors of distances 0 … R - 1 steps."""
    vectors = bias.vectors[:, bias.origin : bias.origin + m].float()  # (H or 1, R, E)
    return torch.matmul(factor.float(), vectors.mT).expand(batch, -1, -1, -1).contiguous()
