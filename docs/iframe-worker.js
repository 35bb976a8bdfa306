// The search of this site runs in a Worker, which browsers do not start from a file. When the site is
// opened from a disk, a hidden frame does that work: it has the same origin and an event loop.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const page = frame.contentDocument;
      page.open(); // or some browsers put another empty page in its place
      page.write("<!doctype html><title>search</title>");
      page.close();
      // What a worker finds in its global scope.
      this.inside.postMessage = (data) => this.tell(data);
      this.inside.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => add(page, next)), Promise.resolve());
      add(page, new URL(url, location.href).href).then(() => {
        this.waiting.forEach((data) => this.ask(data));
        this.waiting = null;
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.ask(data);
    }

    ask(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }

    tell(data) {
      const message = new MessageEvent("message", { data });
      this.dispatchEvent(message);
      if (this.onmessage) this.onmessage(message);
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;

  function add(page, url) {
    return new Promise((done, failed) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = done;
      script.onerror = () => failed(new Error(`cannot load ${url}`));
      page.head.append(script);
    });
  }
}
