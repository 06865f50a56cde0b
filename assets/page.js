// What the page does without the server: the tab's id, light and dark, the settings panel, clean copies,
// the keyboard. Runs once, before the page is drawn, so it listens on the document and waits for elements.
(() => {
  "use strict";
  const body = document.body;
  // A tab keeps its id over reloads, so that the server can bring its conversation back.
  const address = new URL(location.href);
  if (!address.searchParams.get("tab")) {
    const id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (n) => n.toString(16).padStart(2, "0"));
    address.searchParams.set("tab", id.join(""));
    history.replaceState(null, "", address);
  }
  const tab = address.searchParams.get("tab");

  // Light or dark: the person's choice, else the system's.
  const shade = localStorage.getItem("nemolocal.shade");
  if (shade) body.classList.toggle("dark", shade === "dark");
  const toggleShade = () => {
    const isDark = body.classList.toggle("dark");
    localStorage.setItem("nemolocal.shade", isDark ? "dark" : "light");
  };

  // The settings panel: beside the chat where there is room, over it where there is not.
  const hasRoom = () => matchMedia("(min-width: 1100px)").matches;
  const openSettings = (isOpen) => {
    body.classList.toggle("settings-open", isOpen);
    localStorage.setItem("nemolocal.panel", isOpen ? "open" : "closed");
    tidy();
  };
  body.classList.toggle("settings-open", hasRoom() && localStorage.getItem("nemolocal.panel") === "open");

  // One view at a time: the chat, the documents, the models, the hardware. The address remembers which.
  const views = ["chat", "documents", "models", "hardware"];
  const show = (view) => {
    for (const each of views) body.classList.toggle(`view-${each}`, each === view);
    history.replaceState(null, "", `${location.pathname}${location.search}${view === "chat" ? "" : `#${view}`}`);
    tidy();
  };
  const first = views.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat";
  body.classList.add(`view-${first}`);
  if (first !== "chat") {
    // Filled by the button's own event, once it is there and wired.
    const opening = setInterval(() => {
      const button = document.querySelector(`#nav-${first}`);
      if (!button || !document.querySelector("#status .state")) return;
      clearInterval(opening);
      button.click();
    }, 100);
  }

  // What gradio does not say of its elements. It may draw them anew at any time, so this looks after every
  // change; to set what is set already changes nothing.
  const set = (element, name, value) => {
    if (element && element.getAttribute(name) !== value) element.setAttribute(name, value);
  };
  const tidy = () => {
    const isOpen = body.classList.contains("settings-open");
    const panel = document.querySelector("#settings");
    if (panel && panel.inert === isOpen) panel.inert = !isOpen;
    set(document.querySelector("#settings-toggle"), "aria-expanded", String(isOpen));
    set(document.querySelector("#settings-toggle"), "aria-controls", "settings");
    for (const view of views) {
      const isShown = body.classList.contains(`view-${view}`);
      set(document.querySelector(`#nav-${view}`), "aria-current", isShown ? "page" : "false");
    }
    set(document.querySelector("#model-picker input"), "placeholder", "No model chosen");
    set(document.querySelector("#models-said"), "role", "status");
    set(document.querySelector("#documents-said"), "role", "alert");
    set(document.querySelector("#documents-reads"), "aria-live", "polite");
    set(document.querySelector("#attach"), "aria-label", "Add documents");
    set(document.querySelector("#notice"), "role", "alert");
    set(document.querySelector("#status"), "role", "status");
    for (const line of document.querySelectorAll("#messages [data-testid=bot]:has(small)")) {
      set(line, "aria-label", line.textContent.trim());
    }
    // The header's buttons show icons; their names become labels, which the style sheet shows as tool tips.
    for (const button of document.querySelectorAll("#header button")) {
      set(button, "aria-label", button.textContent.trim());
    }
  };
  // The server draws some buttons anew when what they stand for changes. Whoever had the focus on one goes on
  // from the same one, or else from another that acts on the same model.
  let held = null;
  document.addEventListener("focusin", ({ target }) => {
    held = target.dataset?.act ? { act: target.dataset.act, ref: target.dataset.ref } : null;
  });
  const refocus = () => {
    if (!held || (document.activeElement && document.activeElement !== body)) return;
    const drawn = Array.from(document.querySelectorAll("[data-act]"));
    const same = drawn.filter(({ dataset }) => dataset.ref === held.ref);
    const next = same.find(({ dataset }) => dataset.act === held.act)
      ?? same.find(({ dataset }) => dataset.act.startsWith(held.act))
      ?? same.find(({ dataset }) => dataset.act !== "file") ?? same[0];
    if (next?.checkVisibility()) next.focus({ preventScroll: true });
  };
  new MutationObserver(() => { tidy(); refocus(); }).observe(body, { childList: true, subtree: true });
  document.documentElement.lang = "en";

  // Buttons that the server drew hand themselves back through a hidden field of their part of the page.
  const press = ({ dataset, parentElement }) => {
    const part = parentElement.closest("#proposal") ? "#proposal-presses"
      : parentElement.closest("#documents-view") ? "#documents-presses" : "#models-presses";
    const field = document.querySelector(`${part} :is(textarea, input)`);
    if (!field) return;
    const set = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), "value").set;
    set.call(field, JSON.stringify({ act: dataset.act, ref: dataset.ref, at: Date.now() }));
    field.dispatchEvent(new Event("input", { bubbles: true }));
    // Where there is room for one at a time, a chosen model takes the list's place.
    if (["open", "close"].includes(dataset.act)) document.querySelector("#models-view").scrollTo(0, 0);
  };

  // Documents that were chosen, or dropped anywhere on the page, go to the server one after the other; the
  // Documents view shows what becomes of them.
  const send = async (query, file) => {
    try {
      const headers = { "Content-Type": "application/octet-stream" };
      await fetch(`documents/add?${query}`, { method: "POST", headers, body: file });
    } catch {
      query.set("problem", "lost"); // a file that is gone by now, or a server that is
      await fetch(`documents/add?${query}`, { method: "POST" }).catch(() => {});
    }
  };
  const endings = () => (document.querySelector("[data-accept]")?.dataset.accept ?? "").split(",");
  const addDocuments = async (files, folders = []) => {
    document.querySelector("#nav-documents")?.click();
    const batch = crypto.getRandomValues(new Uint32Array(2)).join("");
    for (const file of files) {
      const query = new URLSearchParams({ tab, batch, name: file.name, size: file.size });
      if (folders.includes(file)) query.set("problem", "folder");
      else if (!endings().some((ending) => file.name.toLowerCase().endsWith(ending))) query.set("problem", "kind");
      await send(query, query.has("problem") ? undefined : file);
    }
  };
  const chooseDocuments = () => {
    const field = Object.assign(document.createElement("input"), {
      type: "file", multiple: true, accept: endings().join(","),
    });
    field.addEventListener("change", () => addDocuments(Array.from(field.files)));
    field.click();
  };
  const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
  let leaving = 0;
  document.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    event.stopPropagation();
    event.dataTransfer.dropEffect = "copy";
    body.classList.add("dropping");
    clearTimeout(leaving); // nothing tells reliably that a file was dragged out of the window again
    leaving = setTimeout(() => body.classList.remove("dropping"), 300);
  }, true);
  document.addEventListener("drop", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    event.stopPropagation();
    body.classList.remove("dropping");
    const items = Array.from(event.dataTransfer.items, (item) => [item.getAsFile(), item.webkitGetAsEntry?.()]);
    const folders = items.filter(([file, entry]) => file && entry?.isDirectory).map(([file]) => file);
    addDocuments(items.map(([file]) => file).filter(Boolean), folders);
  }, true);
  // The number of a source in an answer opens what was quoted of it.
  const openCitations = (mark) => {
    const found = mark.closest(".turn")?.querySelectorAll(`details[data-n="${Number(mark.dataset.n)}"]`) ?? [];
    for (const each of found) each.open = true;
    found[0]?.querySelector("summary").focus();
    found[0]?.scrollIntoView({ block: "nearest" });
  };

  const actions = {
    attach: chooseDocuments,
    "documents-choose": chooseDocuments,
    "nav-documents": () => show("documents"),
    shade: toggleShade,
    "settings-toggle": () => openSettings(!body.classList.contains("settings-open")),
    "nav-chat": () => show("chat"),
    "nav-models": () => show("models"),
    "nav-hardware": () => show("hardware"),
    "new-chat": () => show("chat"),
    "export": () => { location.href = `chat.md?tab=${encodeURIComponent(tab)}`; },
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button");
    if (button && Object.hasOwn(actions, button.id)) actions[button.id]();
    if (button?.dataset.act === "models") document.querySelector("#nav-models")?.click();
    else if (button?.dataset.act) press(button);
    else if (button?.classList.contains("cite")) openCitations(button);
  });

  // The server puts an invisible character where a tag could begin, and characters of its own for the marks
  // of formulae (nemolocal/ui/markup.py); what is copied goes without them, and without an answer's figures.
  const marks = ["$$", "$$", "\\[", "\\]", "\\(", "\\)", "$", "$"];
  const clean = (text) =>
    text
      .replace(/\s*<small>[^<]*<\/small>/g, "") // the figures: in what others wrote, no tag stands like this
      .replace(/(<|!(?=\u2060\[)|```|%%%)\u2060/g, "$1")
      .replace(/[\ue000-\ue007]/g, (mark) => marks[mark.charCodeAt(0) - 0xe000]);
  if (navigator.clipboard) {
    const write = navigator.clipboard.writeText.bind(navigator.clipboard);
    navigator.clipboard.writeText = (text) => write(clean(String(text)));
  }
  document.addEventListener("copy", (event) => {
    const field = event.target.closest?.("textarea, input");
    const text = field
      ? field.value.slice(field.selectionStart, field.selectionEnd)
      : String(document.getSelection());
    if (clean(text) === text) return;
    event.clipboardData.setData("text/plain", clean(text));
    event.preventDefault();
  });

  document.addEventListener("keydown", (event) => {
    // Enter that ends the writing of a word in Chinese, Japanese or Korean does not send it.
    if (event.isComposing && event.key === "Enter") event.stopPropagation();
    if (event.key === "Escape") {
      const field = body.classList.contains("view-documents") ? "#documents-question" : "#composer";
      const stop = document.querySelector(`${field} .stop-button`);
      if (stop) stop.click();
      else if (body.classList.contains("settings-open") && !hasRoom()) {
        openSettings(false);
        document.querySelector("#settings-toggle")?.focus();
      }
    }
  }, true);
  document.addEventListener("keypress", (event) => {
    if (event.isComposing && event.key === "Enter") event.stopPropagation();
  }, true);
})();
