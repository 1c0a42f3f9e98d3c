import java.util.LinkedHashMap;
import java.util.Map;

/** JSON lines on stdout, each written in one piece: whatever else a library prints is no such line. */
final class Lines {
    private Lines() {
    }

    /** Prints one object of the given names and values, in their order. */
    static void print(Object... namesAndValues) {
        Map<String, Object> fields = new LinkedHashMap<>();
        for (int i = 0; i < namesAndValues.length; i += 2) {
            fields.put((String) namesAndValues[i], namesAndValues[i + 1]);
        }
        StringBuilder line = new StringBuilder("{");
        for (Map.Entry<String, Object> field : fields.entrySet()) {
            line.append(line.length() > 1 ? "," : "").append(text(field.getKey())).append(':').append(value(field.getValue()));
        }
        synchronized (Lines.class) {
            System.out.println(line.append('}'));
            System.out.flush();
        }
    }

    private static String value(Object value) {
        if (value == null || value instanceof Number || value instanceof Boolean) {
            return String.valueOf(value);
        }
        if (value instanceof Iterable) {
            StringBuilder list = new StringBuilder("[");
            for (Object item : (Iterable<?>) value) {
                list.append(list.length() > 1 ? "," : "").append(value(item));
            }
            return list.append(']').toString();
        }
        return text(value.toString());
    }

    private static String text(String text) {
        StringBuilder quoted = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') {
                quoted.append('\\').append(c);
            } else if (c < ' ' || c > '~') {
                quoted.append(String.format("\\u%04x", (int) c));
            } else {
                quoted.append(c);
            }
        }
        return quoted.append('"').toString();
    }
}
