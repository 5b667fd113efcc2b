// The list of all jobs asks for itself every two seconds, and takes over what has changed.
"use strict";

let tag = "";

async function refresh() {
  if (document.hidden) return;
  try {
    const response = await fetch(location.href, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    if (response.status !== 304) {
      if (!response.ok) throw new Refused(await response.text(), response.status);
      tag = response.headers.get("ETag") || "";
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      const focused = document.activeElement.id;
      for (const id of ["rows", "count", "rest"]) element(id).replaceWith(document.adoptNode(page.getElementById(id)));
      document.title = page.title;
      if (focused && element(focused)) element(focused).focus();
    }
    tellAge(null);
  } catch (error) {
    tellAge(error);
  }
}

setInterval(refresh, 2000);
document.addEventListener("visibilitychange", refresh);
