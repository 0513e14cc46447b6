"""Writing the generated tables; that they are current is in tests/test_readme.py."""

import pytest

from tools import tables

TEXT = """before
<!-- table: contracts -->
old
<!-- end of table -->
between
<!-- table: pairs -->
kept
<!-- end of table -->
after
"""


def test_named_tables_are_replaced_between_their_markers(tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    path.write_text(TEXT, "utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", (path,))
    tables.main(["contracts"])
    assert path.read_text("utf-8") == TEXT.replace("old", tables.contracts())


def test_unknown_table_is_an_error(capsys):
    with pytest.raises(SystemExit) as error:
        tables.main(["contract"])
    assert error.value.code == 2
    assert "unknown table 'contract'" in capsys.readouterr().err


def test_a_test_that_may_be_skipped_gives_no_tick():
    @pytest.mark.skip
    @pytest.mark.parametrize("mechanism", [])
    def test():
        pass

    with pytest.raises(ValueError, match="may be skipped"):
        tables._mechanisms_with(test)


def test_only_built_in_attentions_are_listed():
    assert set(tables.ATTENTIONS) <= tables.registry.BUILT_IN
