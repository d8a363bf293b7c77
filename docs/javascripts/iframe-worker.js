// Search in a site that is read from a folder: browsers start no workers of file:// pages, so the worker of
// the search runs in a hidden frame. Material's offline plugin takes this file for the shim of this name,
// which it would fetch from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      inside.document.open();
      inside.document.close();
      const load = (address) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = address;
        script.onload = done;
        script.onerror = failed;
        inside.document.body.appendChild(script);
      });
      // Of a worker's scripts one waits for the other; Material's awaits the result.
      inside.importScripts = (...addresses) => addresses.reduce(
        (before, address) => before.then(() => load(new URL(address, url).href)), Promise.resolve());
      inside.postMessage = (data) => setTimeout(
        () => this.dispatchEvent(new MessageEvent("message", { data })));
      this.inside = inside;
      this.ready = load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
