"use strict";
(() => {
  // Filters: their values stand in the address, so that what one sees can be sent to another.
  const form = document.querySelector("form[data-filters]");
  if (form) {
    const rows = [...document.getElementById(form.dataset.filters).rows];
    const fields = [...form.elements].filter((one) => one.name);
    const given = new URLSearchParams(location.search);
    for (const field of fields) field.value = given.get(field.name) ?? "";
    const apply = () => {
      const wanted = Object.fromEntries(fields.map((one) => [one.name, one.value.trim()]));
      const words = wanted.q.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const { status, layer, tag, text } = row.dataset;
        const fits = (!wanted.status || status === wanted.status) && (!wanted.layer || layer === wanted.layer)
          && (!wanted.tag || tag.split(" ").includes(wanted.tag)) && words.every((word) => text.includes(word));
        row.hidden = !fits;
        shown += fits;
      }
      form.querySelector("output").value = shown === rows.length ? `${shown} scenarios` : `${shown} of ${rows.length} scenarios`;
    };
    const remember = () => {
      const asked = new URLSearchParams();
      for (const field of fields) if (field.value.trim()) asked.set(field.name, field.value.trim());
      const query = asked.toString();
      history.replaceState(null, "", location.pathname + (query ? `?${query}` : "") + location.hash);
    };
    form.hidden = false;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => { apply(); remember(); });
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      for (const field of fields) field.value = "";
      apply();
      remember();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && !event.ctrlKey && !event.metaKey && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
        event.preventDefault();
        form.elements.q.focus();
      }
    });
    apply();
  }

  // A night in progress: the page is asked for again and its living part put in the old one's place.
  const follow = async () => {
    const old = document.querySelector("[data-live]");
    if (!old || location.protocol === "file:") return;
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const fresh = page.getElementById("live");
        if (!fresh) { location.reload(); return; }
        const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
        old.replaceWith(document.adoptNode(fresh));
        const title = document.querySelector("[data-follow]"), said = page.querySelector("h1");
        if (title && said) title.textContent = said.textContent;
        document.title = page.title;
        if (focused) [...fresh.querySelectorAll("a")].find((one) => one.getAttribute("href") === focused)?.focus();
      }
    } catch (error) { /* the server went away: the next round asks again */ }
    setTimeout(follow, 2000);
  };
  setTimeout(follow, 2000);
})();
