"""Base class of encodings that replace q·k and may add the bias of forget gates."""

from torch import Tensor, nn

from fairseq_rpe.core.bias import TokenBias
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.encodings.base import Encoding
from fairseq_rpe.encodings.forgetting_transformer import Forgetting, forget_gate_bias


class GatedProduct(Encoding):
    """Base class of encodings with bounded products of queries and keys and an option ``gate``.

    With ``gate=forget`` the bias of the Forgetting Transformer is added. The logits of its gates are the last of an
    encoding's token features. Subclasses call :meth:`create_gate` in ``setup``.

    Attributes:
        gate: layer that computes the logits of the gates from a layer's input, or None.
    """

    family = "bias that depends on the content"
    sharing_modes = ("layer", "model")
    position_type = "none"
    gate: nn.Linear | None

    def create_gate(self) -> None:
        """Create the layer of the gates, if the option ``gate`` asks for it."""
        has_gate = self.config.gate == "forget"
        self.dependence = Forgetting.dependence if has_gate else ""
        self.gate = nn.Linear(self.width, self.heads) if has_gate else None

    def log_bias_formulas(self) -> list[str] | list[LogBias] | None:
        """Return 0 for each head, as scores are bounded; None with forget gates, whose bias has no bound."""
        return None if self.config.gate == "forget" else super().log_bias_formulas()

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None) -> TokenBias | None:
        """Return the bias of the forget gates, or None without them."""
        if self.gate is None:
            return None
        assert features is not None
        return forget_gate_bias(features[..., -1], pos, q.shape[2])


def init_linear(layer: nn.Linear) -> None:
    """Initialise a layer: weights with standard deviation 0.02, and a bias of 0."""
    nn.init.normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
