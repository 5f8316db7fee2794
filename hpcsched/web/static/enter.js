// Exchanges the ticket in the address for the cookie of this job's origin. The part after # is sent to no server.

const ticket = location.hash.slice(1);
history.replaceState(null, "", location.pathname);
const status = document.getElementById("status");
try {
  const answer = await fetch(location.pathname, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ticket }),
  });
  if (answer.ok) location.replace("/");
  else status.textContent = (await answer.json()).error;
} catch {
  status.textContent = "The gateway does not answer.";
}
