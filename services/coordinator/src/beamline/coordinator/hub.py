"""Data sets from the Hugging Face hub, where a network is there. Only this file imports huggingface_hub."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from beamline.models.dataset_files import SUFFIXES
from beamline.protocol.errors import ConfigError

MEND = "download its file elsewhere and give it with --from FILE"

_NAME = re.compile(r"[\w.-]+/[\w.-]+(?:/[\w.-]+)*")


def is_hub_name(text: str) -> bool:
    """Whether this is `owner/name`, perhaps with a folder, and cannot be a local data file."""
    return _NAME.fullmatch(text) is not None and PurePosixPath(text).suffix not in SUFFIXES


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Where data sets are downloaded from, and to. None is the library's own choice: HF_ENDPOINT, HF_HOME."""

    endpoint: str | None = None
    cache: Path | None = None
    connect_deadline_s: float = 10.0
    """Until it must have said which files a data set has. A download alone would be tried again for half a minute."""

    def fetch(self, name: str, split: str) -> Path:
        """Download the file of a data set's split; what the cache has is not fetched again.

        Args:
            name: `owner/name`, or `owner/name/folder` where a data set has several variants.
            split: picks the file where there are several.

        Raises:
            ConfigError: no network, no such data set, or no one file to choose; says what was tried.
        """
        owner, repository, *folder = name.split("/")
        repo_id = f"{owner}/{repository}"
        try:
            return self._download(repo_id, choose_file(name, self._list(repo_id, "/".join(folder)), split))
        except ConfigError:
            raise
        except GatedRepoError:
            raise ConfigError(f"{repo_id} asks for consent: give it on the hub and set HF_TOKEN, or {MEND}") from None
        except RepositoryNotFoundError:
            raise ConfigError(f"the hub has no public data set {repo_id}: check the name, or {MEND}") from None
        except Exception as error:  # the library passes on whatever its HTTP client raises
            reason = (str(error) or type(error).__name__).splitlines()[0]
            where = HfApi(self.endpoint).endpoint
            raise ConfigError(f"data set {repo_id} cannot be fetched from {where} ({reason}): {MEND}") from error

    def _list(self, repo_id: str, folder: str) -> list[str]:
        found = HfApi(self.endpoint).dataset_info(repo_id, timeout=self.connect_deadline_s).siblings or []
        return [entry.rfilename for entry in found if PurePosixPath(entry.rfilename).is_relative_to(folder or ".")]

    def _download(self, repo_id: str, file: str) -> Path:
        path = hf_hub_download(
            repo_id,
            file,
            repo_type="dataset",
            endpoint=self.endpoint,
            cache_dir=self.cache,
            etag_timeout=self.connect_deadline_s,
        )
        return Path(str(path))


def choose_file(name: str, files: Sequence[str], split: str) -> str:
    """The one data file, or the one whose name mentions the split. Raises ConfigError naming those that there are."""
    found = [file for file in files if PurePosixPath(file).suffix in SUFFIXES]
    for candidates in (found, [file for file in found if split in PurePosixPath(file).name]):
        if len(candidates) == 1:
            return candidates[0]
    shown = ", ".join(found[:8]) + (" ..." if len(found) > 8 else "")
    raise ConfigError(
        f"data set {name} has {len(found)} data files ({shown or 'none'}), not one of split {split!r}: "
        f"name the folder as OWNER/NAME/FOLDER, or {MEND}"
    )
