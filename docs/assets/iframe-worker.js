// Search for a site that is opened from disk. Browsers refuse Web Workers there, so this runs the worker's script in a
// hidden frame. On a site that a server delivers, the browser's own Worker stays.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<!doctype html><body></body>"
      this.ready = new Promise((resolve, reject) => {
        this.frame.addEventListener("load", () => this.run(url).then(resolve, reject), { once: true })
      })
      document.body.append(this.frame)
    }

    run(url) {
      const inner = this.frame.contentWindow
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inner.document.createElement("script")
          script.onload = () => resolve(inner)
          script.onerror = () => reject(new Error(`cannot load ${source}`))
          script.src = source
          inner.document.body.append(script)
        })
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        if (this.onmessage) this.onmessage(event)
        this.dispatchEvent(event)
      }
      inner.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(next)), Promise.resolve())
      return load(url)
    }

    postMessage(data) {
      this.ready.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
