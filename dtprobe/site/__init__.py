"""The history as pages: a static site that opens from disk, and the same pages for `dtprobe serve`.

`read(out)` gives what is known, `Pages(known).render(path)` one page, `write(out, to)` the whole site. A page's links are
relative and its style and script are in it, so that the folder opens from `file://` and can be moved or sent as one.
"""

from dtprobe.site.known import Known, read
from dtprobe.site.pages import Pages
from dtprobe.site.write import Built, write

__all__ = ["Built", "Known", "Pages", "read", "write"]
