"""A language model's shape, and the parameters, bytes and FLOPs that follow from it."""

from pydantic import Field

from rubato.planning.hardware import Spec

BF16 = 2
"""Bytes of a weight, an activation or a KV entry."""


class ModelSpec(Spec):
    """A decoder with grouped-query attention and gated feed-forward layers, dense or mixture-of-experts; every layer alike."""

    name: str
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    qkv_bias: bool = False
    qk_norm: bool = False
    ffn: int = Field(default=0, ge=0)
    """Width of the dense feed-forward; 0 in a layer of experts."""
    experts: int = Field(default=0, ge=0)
    experts_per_token: int = Field(default=0, ge=0)
    expert_ffn: int = Field(default=0, ge=0)
    shared_ffn: int = Field(default=0, ge=0)
    """Width of the expert that every token passes, with its gate; 0 without."""
    vocab: int = Field(ge=1)
    tied_embeddings: bool = False

    @property
    def attention_params(self) -> int:
        """One layer's projections."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = 2 * self.head_dim if self.qk_norm else 0
        return 2 * self.hidden * q + 2 * self.hidden * kv + (q + 2 * kv if self.qkv_bias else 0) + norms

    @property
    def expert_params(self) -> int:
        """One routed expert of one layer."""
        return 3 * self.hidden * self.expert_ffn

    @property
    def always_params(self) -> int:
        """One layer without its routed experts: attention, dense or shared feed-forward, router, norms."""
        shared = 3 * self.hidden * self.shared_ffn + (self.hidden if self.shared_ffn else 0)
        router = self.hidden * self.experts
        return self.attention_params + 3 * self.hidden * self.ffn + shared + router + 2 * self.hidden

    @property
    def embedding_params(self) -> int:
        """Embedding, output head and the last norm."""
        return (1 if self.tied_embeddings else 2) * self.vocab * self.hidden + self.hidden

    @property
    def params(self) -> int:
        """All of them."""
        return self.layers * (self.always_params + self.experts * self.expert_params) + self.embedding_params

    @property
    def routed_params(self) -> int:
        """The routed experts of all layers: what expert parallelism divides."""
        return self.layers * self.experts * self.expert_params

    @property
    def active_params(self) -> int:
        """Parameters that one token passes."""
        return self.layers * (self.always_params + self.experts_per_token * self.expert_params) + self.embedding_params

    @property
    def weight_bytes(self) -> int:
        """The model in BF16."""
        return BF16 * self.params

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, BF16."""
        return 2 * BF16 * self.layers * self.kv_heads * self.head_dim

    def forward_flops_per_token(self, context: float) -> float:
        """Forward pass of one token that attends to `context` earlier ones: 2 per active parameter, 4 per head entry and key."""
        embedding = self.vocab * self.hidden  # a look-up, no product
        attention = 4 * self.layers * context * self.heads * self.head_dim
        return 2.0 * (self.active_params - (0 if self.tied_embeddings else embedding)) + attention
