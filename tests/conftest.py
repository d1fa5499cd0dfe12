"""What all tests share: shapes that are checked, and examples that are the same in every run.

The shapes in the signatures of these packages (``Float[Tensor, "b d"]``) are checked at every call; the hook
must stand before their first import.
"""

from hypothesis import settings
from jaxtyping import install_import_hook

CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"  # an int is a float, too
CHECKED = ["lessons_lib.models", "lessons_lib.sequence_parallel", "lessons_lib.tensor_parallel"]
install_import_hook(CHECKED, CHECKER)

settings.register_profile("same everywhere", derandomize=True, deadline=None)
settings.load_profile("same everywhere")
