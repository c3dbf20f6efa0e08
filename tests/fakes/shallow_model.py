"""The default model without most of its layers: its vocabulary, shapes and quantization at a fraction of the work.
What it says means nothing, and is the same every time."""

import gguf

LAYERS = 4


def write_shallow(source, path):
    """A GGUF file with the first layers of another."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            value = LAYERS if name == f"{architecture}.block_count" else field.contents()
            writer.add_key_value(name, value, field.types[0], field.types[-1])
    for tensor in reader.tensors:
        if _layer(tensor.name) < LAYERS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layer(name):
    """-1 for what belongs to none."""
    return int(name.split(".")[1]) if name.startswith("blk.") else -1
