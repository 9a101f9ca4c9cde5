"use strict";
// Fetches the page's middle again whenever the server says that it has changed.
(() => {
  const body = document.body, live = document.getElementById("live"), middle = document.getElementById("middle");
  const query = new URLSearchParams(body.dataset.query);
  const asked = new URLSearchParams(query);
  asked.set("digest", body.dataset.digest);
  const source = new EventSource("changes?" + asked);
  source.onopen = () => { live.textContent = "live"; };
  source.onerror = () => { live.textContent = "the connection was lost; trying again"; };
  source.onmessage = async () => {
    try {
      const answer = await fetch("middle?" + query);
      if (answer.status === 401) { location.reload(); return; }
      if (!answer.ok) { live.textContent = await answer.text(); return; }
      const open = [...middle.querySelectorAll("details[open]")].map((one) => one.id);
      const focused = document.activeElement ? document.activeElement.id : "";
      middle.innerHTML = await answer.text();
      for (const id of open) { const one = document.getElementById(id); if (one) one.open = true; }
      if (focused) { const one = document.getElementById(focused); if (one) one.focus({ preventScroll: true }); }
      live.textContent = "live, last changed at " + new Date().toISOString().slice(11, 19) + " UTC";
    } catch { live.textContent = "the connection was lost; trying again"; }
  };
})();
