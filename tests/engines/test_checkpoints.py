"""What a checkpoint's directory reveals before any weight is loaded."""

from __future__ import annotations

import pytest

from relabel.labelers.engines.checkpoints import adapter_dir
from relabel.manifests.errors import ModelError


@pytest.mark.parametrize("name", ["adapter_model.bin", "new_embeddings.bin", "adapter.pt"])
def test_an_adapter_that_holds_pickle_is_refused_before_a_model_is_loaded(name, tmp_path):
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_bytes(b"{}")
    assert adapter_dir(str(tmp_path)) == tmp_path
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="which is pickle"):
        adapter_dir(str(tmp_path))
