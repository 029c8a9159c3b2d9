// Search in pages that are opened as files, without a server. Browsers start no worker from file://, so the script of the
// theme's search worker runs in a hidden frame of this page instead; it looks for `IFrameWorker` in its parent.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inner = this.frame.contentDocument;
      inner.open(); // else a browser may replace the empty document later, and what was put into it
      inner.write("<!doctype html><body>");
      inner.close();
      const load = (address) =>
        new Promise((loaded, failed) => {
          const script = inner.createElement("script");
          script.src = new URL(address, location.href).href;
          script.onload = loaded;
          script.onerror = () => failed(new Error(`cannot load ${script.src}`));
          inner.body.appendChild(script);
        });
      const self = this.frame.contentWindow;
      self.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      self.importScripts = async (...addresses) => {
        for (const address of addresses) await load(address);
      };
      this.started = load(url);
    }

    postMessage(data) {
      this.started.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
