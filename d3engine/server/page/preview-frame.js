// Inside the frame of a preview: show what the page sends, cleaned by DOMPurify. The frame's policy allows no script but
// this page's, and no request.

const CLEAN = {
  WHOLE_DOCUMENT: true,
  RETURN_DOM: true,
  USE_PROFILES: { html: true, svg: true, svgFilters: true, mathMl: true },
  ALLOWED_URI_REGEXP: /^(?!\/\/)(?:data:|[^a-z]|[a-z+.-]+(?:[^a-z+.:-]|$))/i, // no link leads to another host
};

addEventListener("message", ({ data, source }) => {
  if (source === parent) document.documentElement.replaceWith(globalThis.DOMPurify.sanitize(data, CLEAN));
});
addEventListener("keydown", ({ key }) => key === "Escape" && parent.postMessage("close", "*"));
