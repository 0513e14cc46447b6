from typing import Any

from ml_collections import ConfigDict

def DEFINE_config_dict(
    name: str, config: ConfigDict, *args: Any, **kwargs: Any
) -> Any: ...
