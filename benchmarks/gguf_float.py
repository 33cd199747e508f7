"""A GGUF file with the same numbers as another, unpacked to floating point."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from h2o_kv.models import cache_dir, converted_folder


def float_gguf(source: Path, dtype: str, progress: Callable[[float], object]) -> Path:
    """The GGUF file `source` with weights of one floating-point type, made once.

    It is kept beside the converted models. Its numbers are those of `convert_model`. Vectors (the
    norms) stay float32, as in llama.cpp's own files.

    Parameters
    ----------
    source : Path
    dtype : {"float32", "bfloat16", "float16"}
    progress : callable
        Called with the fraction that is done.

    Returns
    -------
    Path
    """
    target = cache_dir() / "engines" / f"{converted_folder(source).name}-{dtype}.gguf"
    if target.exists():
        return target
    import gguf

    stored = {
        "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
        "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
        "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    }
    matrix_type, file_type = stored[dtype]
    reader = gguf.GGUFReader(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    architecture = reader.get_field(gguf.Keys.General.ARCHITECTURE)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
        writer = gguf.GGUFWriter(Path(folder, target.name), architecture.contents())
        written_anew = (
            gguf.Keys.General.ARCHITECTURE,  # by the writer
            gguf.Keys.General.FILE_TYPE,
            gguf.Keys.General.QUANTIZATION_VERSION,
        )
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in written_anew:
                continue
            kinds = field.types
            inner = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=inner)
        writer.add_file_type(file_type)
        for index, tensor in enumerate(reader.tensors):
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            kind = matrix_type if values.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
            progress((index + 1) / len(reader.tensors))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        Path(folder, target.name).rename(target)
    return target
