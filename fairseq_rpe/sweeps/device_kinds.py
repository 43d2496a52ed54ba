"""Peak speed and memory of GPUs by name, as their makers state them; they were not measured here."""

from dataclasses import dataclass

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import did_you_mean


@dataclass(frozen=True)
class DeviceKind:
    """A kind of GPU.

    Attributes:
        title: name of the product.
        memory: memory in units of 10⁹ bytes.
        bf16: peak of dense matrix products with bfloat16 inputs, in TFLOP/s.
        fp32: peak in float32 without TF32, which trainings here do not use, in TFLOP/s; None: not listed here.
    """

    title: str
    memory: float
    bf16: float
    fp32: float | None = None

    def peak(self, compute_dtype: str) -> float | None:
        """Return the peak in TFLOP/s for ``--compute-dtype`` fp32 or bf16; None if it is unknown."""
        return self.bf16 if compute_dtype == "bf16" else self.fp32


@dataclass(frozen=True)
class Hardware:
    """Devices that an estimate is for; None: unknown, so that the estimate leaves out what depends on it.

    Attributes:
        name: name of a device, for texts.
        kind: its kind, from the list of known ones.
        tflops: peak in TFLOP/s, in place of that of the kind.
        memory: bytes of a device, in place of those of the kind.
        utilisation: share of the peak that a training reaches.
        tokens_per_second: measured tokens of a training that one device processes in a second, in place of a peak.
    """

    name: str = "device"
    kind: DeviceKind | None = None
    tflops: float | None = None
    memory: float | None = None
    utilisation: float = 0.3
    tokens_per_second: float | None = None

    @property
    def device_memory(self) -> float | None:
        """Bytes of a device."""
        return self.kind.memory * 1e9 if self.memory is None and self.kind is not None else self.memory

    def peak(self, compute_dtype: str) -> float | None:
        """Return the peak in FLOP/s, None if it is unknown.

        Raises:
            UserError: no peak of the device is known for this dtype.
        """
        if self.tflops is not None:
            return self.tflops * 1e12
        if self.kind is None or self.tokens_per_second is not None:
            return None
        peak = self.kind.peak(compute_dtype)
        if peak is None:
            raise UserError(
                f"the peak of {self.kind.title} in {compute_dtype} is not known here: give --tflops, or "
                "--compute-dtype bf16"
            )
        return peak * 1e12


DEVICE_KINDS = {
    "a100": DeviceKind("A100 80GB", 80, 312, 19.5),
    "a100-40gb": DeviceKind("A100 40GB", 40, 312, 19.5),
    "h100": DeviceKind("H100 SXM", 80, 989, 67),
    "h100-pcie": DeviceKind("H100 PCIe", 80, 756, 51.2),
    "h100-nvl": DeviceKind("H100 NVL", 94, 835),
    "h200": DeviceKind("H200 SXM", 141, 989, 67),
    "b200": DeviceKind("B200", 180, 2250),
    "a30": DeviceKind("A30", 24, 165, 10.3),
    "a40": DeviceKind("A40", 48, 149.7, 37.4),
    "l4": DeviceKind("L4", 24, 121, 30.3),
    "l40s": DeviceKind("L40S", 48, 362, 91.6),
    "rtx3090": DeviceKind("RTX 3090", 24, 71, 35.6),
    "rtx4090": DeviceKind("RTX 4090", 24, 165.2, 82.6),
    "rtx5090": DeviceKind("RTX 5090", 32, 209.5),
    "mi300x": DeviceKind("MI300X", 192, 1307, 163.4),
}


def find_device(name: str) -> DeviceKind:
    """Return a kind of device by its name.

    Raises:
        UserError: there is no such device.
    """
    if name not in DEVICE_KINDS:
        raise UserError(
            f"unknown device '{name}'{did_you_mean(name, DEVICE_KINDS)}; known: {', '.join(DEVICE_KINDS)}; for another "
            "one give --tflops and --memory"
        )
    return DEVICE_KINDS[name]
