"""Files: sizes as text, and the mount of a path."""

from pathlib import Path

import pytest

from hpc_rl.core.files import format_size, mount_of


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.0 KB"), (1300, "1.3 KB"), (1_340_000, "1.3 MB"), (64 << 20, "64.0 MB"), (3 << 29, "1.5 GB")],
)
def test_a_size_is_readable(num_bytes, text):
    assert format_size(num_bytes) == text


def test_the_longest_mount_point_above_a_path_counts(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"2 1 0:9 / {tmp_path}/with\\040blank rw - tmpfs none rw\n"
        f"3 2 0:9 / {tmp_path}/with\\040blank/nfs rw - nfs4 server:/x rw,vers=4.2,local_lock=none\n"
    )
    options = ["rw", "rw", "vers=4.2", "local_lock=none"]
    assert mount_of(tmp_path / "with blank/nfs/trials", table) == ("nfs4", options)
    assert mount_of(tmp_path / "with blank/trials", table)[0] == "tmpfs"
    assert mount_of(tmp_path / "with blanks", table)[0] == "ext4"
    assert mount_of(Path("/"), table)[0] == "ext4"
    assert mount_of(tmp_path, tmp_path / "none") == ("", [])


def test_the_later_of_two_mounts_on_one_point_hides_the_other(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:9 / / rw - overlay none rw\n")
    assert mount_of(tmp_path, table)[0] == "overlay"
