"""A browser without a window, driven over the DevTools protocol by a pipe. Needs nothing but Python."""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile

NAMES = ("chromium", "chromium-browser", "google-chrome")
# What a browser logs that a page should not have it log.
LOUD = ("error", "assert")


def find():
    """Returns the program: that of OUTCORE_CHROMIUM, or the first on PATH; None if there is none."""
    return os.environ.get("OUTCORE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def beyond_4(descriptor):
    """Returns another descriptor of the same file, beyond those that the browser wants for itself."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


class Page:
    """One page of a browser of its own. `with Page(program, width, height) as page`."""

    def __init__(self, program, width, height, dark=False):
        self.profile = tempfile.mkdtemp(prefix="outcore-browser-")
        read, theirs_out = map(beyond_4, os.pipe())
        theirs_in, write = map(beyond_4, os.pipe())
        # It reads commands from descriptor 3, and writes what happens to descriptor 4.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-'
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--lang=en-US"]
        command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
        command += ["--disable-sync", "--hide-scrollbars", f"--user-data-dir={self.profile}", "--remote-debugging-pipe"]
        self.log = open(os.path.join(self.profile, "log"), "w+")
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command, "about:blank"], pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        os.close(theirs_in)
        os.close(theirs_out)
        self.commands, self.happenings = os.fdopen(write, "wb"), os.fdopen(read, "rb")
        self.held, self.numbers, self.session, self.complaints = b"", itertools.count(1), None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Its own command first: it ends all its processes then.
        try:
            self.session = None
            self.call("Browser.close")
        except OSError:
            self.process.kill()
        self.process.wait()
        for file in (self.log, self.commands, self.happenings):
            try:
                file.close()
            except OSError:
                pass
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, **params):
        """Returns the result of a command, after what happens before it is noted."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while True:
            answer = self.next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.note(answer.get("method"), answer.get("params", {}))

    def next(self):
        while b"\0" not in self.held:
            more = os.read(self.happenings.fileno(), 1 << 16)
            if not more:
                self.log.seek(0)
                raise OSError(f"the browser has ended: {self.log.read()[-2000:]}")
            self.held += more
        message, self.held = self.held.split(b"\0", 1)
        return json.loads(message)

    def note(self, what, params):
        if what == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif what == "Runtime.consoleAPICalled" and params["type"] in LOUD:
            self.complaints.append(str([argument.get("value") for argument in params["args"]]))
        elif what == "Log.entryAdded" and params["entry"]["level"] in LOUD:
            entry = params["entry"]
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    def evaluate(self, expression):
        """Returns what an expression of JavaScript is, after its promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression):
        """Waits until an expression is true. There is no deadline: whoever runs this watches for silence."""
        look = f"const look = () => ({expression}) ? done(true) : setTimeout(look, 20); look();"
        self.evaluate(f"new Promise((done) => {{ {look} }})")

    def open(self, url):
        self.call("Page.navigate", url=url)
        while self.evaluate("document.readyState + ' ' + location.href") != f"complete {url}":
            pass

    def type(self, selector, text):
        """Types into a field, in place of what is there."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{field}.value = '', {field}.focus()")
        self.call("Input.insertText", text=text)

    def press(self, selector):
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def enter(self):
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def colours(self, selector):
        """Returns how many pixels of a canvas have which colour, as `#rrggbb`."""
        return self.evaluate(f"""(() => {{
            const canvas = document.querySelector({json.dumps(selector)}), counts = {{}};
            const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            for (let at = 0; at < data.length; at += 4) {{
                if (data[at + 3] < 255) continue;
                const name = "#" + [0, 1, 2].map((i) => data[at + i].toString(16).padStart(2, "0")).join("");
                counts[name] = (counts[name] || 0) + 1;
            }}
            return counts;
        }})()""")

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
