"""A module that nobody may fork after: it starts a thread when it is imported."""

import threading

threading.Thread(target=threading.Event().wait, name="of an import", daemon=True).start()
