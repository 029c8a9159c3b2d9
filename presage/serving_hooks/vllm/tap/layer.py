"""Which hidden states the tap takes: those after the final norm, or those after one transformer layer.

PBKV takes them after the final norm and finds in its appendix C.3 that the best layer depends on the model and on the
application. Layers count as Hugging Face's `output_hidden_states` and PBKV count them: 1 is the first transformer
layer, and a state is the residual stream behind it. After the last layer it has not been through the final norm yet.
"""

from __future__ import annotations

from presage.errors import ConfigurationError


def counted_from_1(layer: int | None, layers: int) -> int | None:
    """The layer as recordings and predictors keep it.

    Args:
        layer: the setting `state_layer`; negative numbers count from the end.
        layers: transformer layers of the served model.

    Returns:
        1..layers; None for the states after the final norm.

    Raises:
        ConfigurationError: the model has no such layer.
    """
    if layer is None:
        return None
    if not 1 <= abs(layer) <= layers:
        raise ConfigurationError(
            f"presage.state_layer is {layer}; this model has {layers} transformer layers: give 1 to {layers}, or -1 to "
            f"-{layers} from the end, or leave it out for the states after the final norm"
        )
    return layer if layer > 0 else layers + 1 + layer
